"""Functions of the package flash-attn 2 for inference, served by kernelhub: an engine changes its import and no call.

    from kernelhub.compat.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

Parameters, shapes and results are those of flash-attn 2.8: causal masks and windows are aligned to the last key, scores
are scaled by ``1 / sqrt(D)`` unless `softmax_scale` is given, LSEs are natural logarithms. Training is not supported:
dropout and gradients are refused, as are ALiBi, rotary embeddings and left padding. `deterministic` and `num_splits`
have no effect. flash-attn itself is not needed; where it is installed, it is one of the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.arguments import check_is_tensor, describe, dtype_name, refuse
from kernelhub.ops.attention.attention import attention
from kernelhub.ops.attention.paged_attention import paged_attention
from kernelhub.ops.kv_cache.op import write_kv_cache
from kernelhub.ops.values import values_to_check

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

Sides = tuple[int, int]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend over batches of equal lengths.

    Args:
        q: float16 or bfloat16 ``[B, S, H, D]``; float32, too.
        k: ``[B, SK, KH, D]``; H is a multiple of KH.
        v: as k.
        dropout_p: 0.0.
        softmax_scale: factor of q k^T; by default ``1 / sqrt(D)``.
        causal: the last query sees all keys, each one before it one fewer.
        window_size: how many keys before and after its own position a query sees; -1 for no limit.
        softcap: bound of the scores; 0.0 for none.
        alibi_slopes: None.
        deterministic: no effect.
        return_attn_probs: also return the LSE and, in place of the probabilities, None.

    Returns:
        ``[B, S, H, D]``; with `return_attn_probs` also float32 ``[B, H, S]`` and None.

    Raises:
        InvalidArgument: an argument is not supported; the message names it.
        NoKernel: no kernel supports the call.

    Example:
        >>> import torch
        >>> from kernelhub.compat.flash_attn import flash_attn_func
        >>> q, k, v = torch.randn(3, 2, 16, 8, 64)
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([2, 16, 8, 64])
    """
    _inference("flash_attn_func", dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    features = _features("flash_attn_func", causal, window_size, softcap, softmax_scale)
    result = attention(q, k, v, return_lse=return_attn_probs, **features)
    return (*result, None) if return_attn_probs else result


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attend over sequences of different lengths, packed one after another, or with keys in pages.

    Args:
        q: ``[T, H, D]``.
        k: ``[TK, KH, D]``; with `block_table` the cache ``[num_pages, page_size, KH, D]``.
        v: as k.
        cu_seqlens_q: int32 ``[num_seqs + 1]``, offsets of the sequences in q.
        cu_seqlens_k: int32 ``[num_seqs + 1]``, offsets in k; with `block_table` only their differences matter.
        max_seqlen_q: most queries of a sequence.
        max_seqlen_k: most keys of a sequence.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as of `flash_attn_func`.
        return_attn_probs: also return the LSE, float32 ``[H, T]``, and None.
        block_table: int32 ``[num_seqs, max_pages]``; entries past a sequence's last page are not read.

    Returns:
        ``[T, H, D]``; with `return_attn_probs` also the LSE and None.

    Raises:
        InvalidArgument: an argument is not supported; the message names it.
        NoKernel: no kernel supports the call.
    """
    op = "flash_attn_varlen_func"
    _inference(op, dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    features = _features(op, causal, window_size, softcap, softmax_scale) | {"return_lse": return_attn_probs}
    if block_table is None:
        result = attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **features)
    else:
        check_is_tensor(op, "cu_seqlens_k", cu_seqlens_k)
        lens = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        result = paged_attention(q, k, v, block_table, lens, cu_seqlens_q, max_seqlen_q, **features)
    return (*result, None) if return_attn_probs else result


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attend to a KV cache, and first write new keys and values to it if they are given.

    Args:
        q: ``[B, S, H, D]``: the last S tokens of each sequence.
        k_cache: ``[B, SK, KH, D]``, or with `block_table` ``[num_pages, page_size, KH, D]``.
        v_cache: as k_cache.
        k: ``[B, SN, KH, D]``, written after the `cache_seqlens` tokens of each sequence, in place.
        v: as k.
        rotary_cos, rotary_sin: None.
        cache_seqlens: tokens of each sequence in the cache, without those of `k`: int32 ``[B]``, or one number for all;
            all of a cache without pages unless given.
        cache_batch_idx: ``[B]``, which row of a cache without pages belongs to each sequence.
        cache_leftpad: None.
        block_table: int32 ``[B, max_pages]``; entries past a sequence's last page are not read.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as of `flash_attn_func`.
        rotary_interleaved, num_splits: no effect.
        return_softmax_lse: also return the LSE, float32 ``[B, H, S]``.

    Returns:
        ``[B, S, H, D]``; with `return_softmax_lse` also the LSE.

    Raises:
        InvalidArgument: an argument is not supported; the message names it.
        NoKernel: no kernel supports the call.
    """
    op = "flash_attn_with_kvcache"
    _inference(
        op,
        alibi_slopes=alibi_slopes,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_leftpad=cache_leftpad,
    )
    _check_form(op, "q", q)
    _check_form(op, "k_cache", k_cache)
    _check_form(op, "v_cache", v_cache)
    batch, tokens = q.shape[:2]
    if block_table is None:  # each row of the cache is a page
        block_table = _rows(op, cache_batch_idx, k_cache, q)
    elif cache_batch_idx is not None:
        refuse(op, "cache_batch_idx", "is given with block_table", "pass the rows of block_table in that order")
    elif cache_seqlens is None:
        refuse(op, "cache_seqlens", "is missing with block_table", "pass the number of tokens of each sequence")
    else:
        _check_table(op, block_table, batch)
    if (k is None) != (v is None):
        refuse(op, "k" if k is None else "v", "is missing", "pass k and v, or neither")
    if cache_seqlens is None and k is not None:
        refuse(op, "cache_seqlens", "is missing with k", "pass the number of tokens before those of k")
    lens = _lengths(op, k_cache.shape[1] if cache_seqlens is None else cache_seqlens, batch, q)
    if k is not None and v is not None:
        _check_new(op, "k", k, k_cache, batch, k.shape[1] if isinstance(k, Tensor) and k.ndim == 4 else None)
        _check_new(op, "v", v, v_cache, batch, k.shape[1])
        _check_room(op, lens, k.shape[1], block_table, k_cache)
        _append(k_cache, v_cache, k, v, block_table, lens)
        lens = lens + k.shape[1]
    features = _features(op, causal, window_size, softcap, softmax_scale) | {"return_lse": return_softmax_lse}
    one = tokens == 1
    result = paged_attention(q[:, 0] if one else q, k_cache, v_cache, block_table, lens, **features)
    if not return_softmax_lse:
        return result[:, None] if one else result
    out, lse = result
    return (out[:, None], lse.transpose(0, 1)[..., None]) if one else (out, lse)


def _check_form(op: str, parameter: str, given: Any) -> None:
    """It is a tensor of four dimensions."""
    check_is_tensor(op, parameter, given)
    if given.ndim != 4:
        wanted = "[B, S, H, D]" if parameter == "q" else "[B, SK, KH, D], or [num_pages, page_size, KH, D] of pages"
        refuse(op, parameter, f"has shape {list(given.shape)}", f"give {wanted}")


def _rows(op: str, cache_batch_idx: Any, k_cache: Tensor, q: Tensor) -> Tensor:
    """The row of the cache of each sequence, as a table of one page a sequence."""
    batch = q.shape[0]
    if cache_batch_idx is None:
        if k_cache.shape[0] < batch:
            refuse(op, "k_cache", f"has {k_cache.shape[0]} rows", f"give one for each of {batch} sequences")
        return torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
    check_is_tensor(op, "cache_batch_idx", cache_batch_idx)
    if cache_batch_idx.dtype not in (torch.int32, torch.int64) or cache_batch_idx.shape != (batch,):
        refuse(op, "cache_batch_idx", f"is {describe(cache_batch_idx)}", f"give int32 [{batch}]")
    given = values_to_check(cache_batch_idx)
    for sequence, row in enumerate([] if given is None else given.tolist()):
        if not 0 <= row < k_cache.shape[0]:
            problem = f"is {row} for sequence {sequence}"
            refuse(op, "cache_batch_idx", problem, f"k_cache has rows 0 to {k_cache.shape[0] - 1}")
    made: Tensor = cache_batch_idx.to(torch.int32)[:, None].contiguous()
    return made


def _check_table(op: str, block_table: Any, batch: int) -> None:
    check_is_tensor(op, "block_table", block_table)
    table: Tensor = block_table
    if table.dtype is not torch.int32 or table.ndim != 2 or table.shape[0] != batch:
        refuse(op, "block_table", f"is {describe(table)}", f"give int32 [{batch}, max_pages]")


def _lengths(op: str, cache_seqlens: Any, batch: int, q: Tensor) -> Tensor:
    """The tokens of each sequence as a tensor."""
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.dtype is not torch.int32 or cache_seqlens.shape != (batch,):
            refuse(op, "cache_seqlens", f"is {describe(cache_seqlens)}", f"give int32 [{batch}], or one int")
        return cache_seqlens
    if not isinstance(cache_seqlens, int) or isinstance(cache_seqlens, bool):
        refuse(op, "cache_seqlens", f"is {cache_seqlens!r}", f"give int32 [{batch}], or one int")
    return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)


def _check_new(op: str, parameter: str, new: Any, cache: Tensor, batch: int, tokens: int | None) -> None:
    """New tokens have the form of the cache: nothing is broadcast."""
    check_is_tensor(op, parameter, new)
    wanted = (batch, new.shape[1] if tokens is None and new.ndim > 1 else tokens, *cache.shape[2:])
    if new.shape != wanted:
        refuse(op, parameter, f"has shape {list(new.shape)}", f"give {[batch, tokens or 'SN', *cache.shape[2:]]}")
    if new.dtype is not cache.dtype:
        refuse(op, parameter, f"has dtype {dtype_name(new.dtype)}", f"{parameter}_cache has {dtype_name(cache.dtype)}")


def _check_room(op: str, lens: Tensor, tokens: int, block_table: Tensor, k_cache: Tensor) -> None:
    """New tokens fit behind the others; of lengths on a GPU only KERNELHUB_CHECK=1 finds that out."""
    given, room = values_to_check(lens), block_table.shape[1] * k_cache.shape[1]
    for sequence, length in enumerate([] if given is None else given.tolist()):
        if length < 0 or length + tokens > room:
            problem = f"is {length} for sequence {sequence}, before {tokens} new tokens"
            refuse(op, "cache_seqlens", problem, f"give 0 to {room - tokens}: a sequence has room for {room} tokens")


def _append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, block_table: Tensor, lens: Tensor) -> None:
    """Write new tokens after those that each sequence has in its pages; those past its pages are not written."""
    size, columns = k_cache.shape[1], block_table.shape[1]
    at = lens[:, None].long() + torch.arange(k.shape[1], device=k.device)
    column = at // size
    pages = block_table.long().gather(1, column.clamp(0, columns - 1))
    inside = (column >= 0) & (column < columns) & (pages >= 0) & (pages < k_cache.shape[0])
    slots = torch.where(inside, pages * size + at % size, -1)
    write_kv_cache(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots.flatten())


def _features(op: str, causal: bool, window_size: Any, softcap: float, softmax_scale: float | None) -> dict[str, Any]:
    """The parameters of both ops."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        refuse(op, "window_size", f"is {window_size!r}", "give (left, right); -1 is no limit")
    window = None if tuple(window_size) == (-1, -1) else tuple(window_size)
    return {"causal": causal, "window": window, "softcap": softcap or None, "scale": softmax_scale}


def _inference(op: str, **given: Any) -> None:
    """Refuse what only training, or another kernel, supports."""
    for parameter, value in given.items():
        if value is not None and not (parameter == "dropout_p" and value == 0):
            fix = (
                "pass 0.0: kernelhub serves inference" if parameter == "dropout_p" else "pass None, or call flash-attn"
            )
            refuse(op, parameter, "is given" if isinstance(value, Tensor) else f"is {value!r}", fix)
