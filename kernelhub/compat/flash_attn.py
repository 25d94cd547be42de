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

from kernelhub.ops.arguments import refuse
from kernelhub.ops.attention.attention import attention
from kernelhub.ops.attention.paged_attention import paged_attention

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
    features = _features(causal, window_size, softcap, softmax_scale)
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
    _inference("flash_attn_varlen_func", dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    features = _features(causal, window_size, softcap, softmax_scale) | {"return_lse": return_attn_probs}
    if block_table is None:
        result = attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **features)
    else:
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
    batch, tokens = q.shape[:2]
    if block_table is None:  # each row of the cache is a page
        rows = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx
        block_table = rows.to(torch.int32)[:, None].contiguous()
        lens = k_cache.shape[1] if cache_seqlens is None else cache_seqlens
    elif cache_batch_idx is not None:
        refuse(op, "cache_batch_idx", "is given with block_table", "pass the rows of block_table in that order")
    elif cache_seqlens is None:
        refuse(op, "cache_seqlens", "is missing with block_table", "pass the number of tokens of each sequence")
    else:
        lens = cache_seqlens
    if not isinstance(lens, Tensor):
        lens = torch.full((batch,), lens, dtype=torch.int32, device=q.device)
    if (k is None) != (v is None):
        refuse(op, "k" if k is None else "v", "is missing", "pass k and v, or neither")
    if k is not None and v is not None:
        _append(k_cache, v_cache, k, v, block_table, lens)
        lens = lens + k.shape[1]
    features = _features(causal, window_size, softcap, softmax_scale) | {"return_lse": return_softmax_lse}
    one = tokens == 1
    result = paged_attention(q[:, 0] if one else q, k_cache, v_cache, block_table, lens, **features)
    if not return_softmax_lse:
        return result[:, None] if one else result
    out, lse = result
    return (out[:, None], lse.transpose(0, 1)[..., None]) if one else (out, lse)


def _append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, block_table: Tensor, lens: Tensor) -> None:
    """Write new tokens after those that each sequence has in its pages."""
    at = lens[:, None].long() + torch.arange(k.shape[1], device=k.device)
    pages = block_table.long().gather(1, at // k_cache.shape[1])
    k_cache[pages, at % k_cache.shape[1]] = k
    v_cache[pages, at % k_cache.shape[1]] = v


def _features(causal: bool, window_size: Sides, softcap: float, softmax_scale: float | None) -> dict[str, Any]:
    """The parameters of both ops."""
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
