"""One sequence at a time: where its rows and keys are, and its pages gathered.

The torch kernels run a batch as a loop over single sequences; they differ only in how one is attended.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.attention.arguments import Scale
from kernelhub.runtime.scratch import scratch

# q [S, H, D], k [L, KH, D], v [L, KH, DV], out [S, H, DV], lse [H, S] or None
Sequence = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def dense_sequences(
    q: Tensor, k: Tensor, v: Tensor, step: DenseStep, out: Tensor, lse: Tensor | None
) -> Iterator[Sequence]:
    """The sequences of an `attention` call, batched or ragged; those without queries are left out."""
    if step.cu_seqlens_q is None:
        for i in range(q.shape[0]):
            yield q[i], k[i], v[i], out[i], None if lse is None else lse[i]
        return
    starts_q, starts_k = step.q_offsets(), step.k_offsets()
    for i in range(step.num_seqs):
        rows, keys = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        if rows.stop > rows.start:
            yield q[rows], k[keys], v[keys], out[rows], None if lse is None else lse[:, rows]


def paged_sequences(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, step: PagedStep, window_left: int, out: Tensor, lse: Tensor | None
) -> Iterator[Sequence]:
    """The sequences of a `paged_attention` call over NHD caches; k and v live until the next is requested.

    Keys before the window of a sequence's first query are left out. Masks align with the last key, so that
    changes nothing else.
    """
    lengths = step.lengths()
    starts = step.q_offsets() if step.cu_seqlens_q is not None else list(range(step.num_seqs + 1))
    for i in range(step.num_seqs):
        if q.ndim == 4:
            rows, out_i, lse_i = q[i], out[i], None if lse is None else lse[i]
        else:
            span = slice(starts[i], starts[i + 1])
            rows, out_i, lse_i = q[span], out[span], None if lse is None else lse[:, span]
        if rows.shape[0]:
            keys = visible_keys(lengths[i], rows.shape[0], window_left)
            yield rows, *gathered_kv(k_cache, v_cache, step.block_table[i], keys), out_i, lse_i


def visible_keys(length: int, tokens: int, window_left: int) -> slice:
    """The keys of a sequence that the window of its first query reaches, up to its last."""
    return slice(max(0, length - tokens - window_left) if window_left >= 0 else 0, length)


def gathered_kv(k_cache: Tensor, v_cache: Tensor, pages: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence, [keys, KH, D], from its row of the block table."""
    page_size = k_cache.shape[1]
    first = keys.start // page_size
    used = pages[first : -(-keys.stop // page_size)].long()
    inside = slice(keys.start - first * page_size, keys.stop - first * page_size)
    return gathered("k", k_cache, used)[inside], gathered("v", v_cache, used)[inside]


def gathered(tag: str, cache: Tensor, pages: Tensor) -> Tensor:
    """Pages [..., P] of an NHD cache as [..., P * page_size, KH, D]: a view where they are adjacent, else a copy.

    The copy is ordered by heads, in rows of one head's width, so that products read memory in order: for 8 x 2048
    tokens of 8 heads of 128, gathering and flash attention took 9 to 11 ms, with whole pages copied 9 or 18 ms from one
    process to the next (2 cores, torch 2.13, bfloat16).
    """
    page_size, kv_heads, width = cache.shape[1:]
    if not cache.is_cpu:  # where entries of the block table were not looked at, and a wrong one ends the process
        pages = pages.clamp(0, cache.shape[0] - 1) if cache.shape[0] else pages[..., :0]
    count = pages.numel()
    if count and pages.shape[-1] == count:
        first = int(pages.reshape(-1)[0])
        if count == 1 or bool((pages == torch.arange(first, first + count, device=pages.device)).all()):
            return cache[first : first + count].flatten(0, 1).view(*pages.shape[:-1], -1, kv_heads, width)
    raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache  # torch 2.8 cannot index float8
    if raw.stride(3) == 1 and all(stride % width == 0 for stride in raw.stride()[:3]):
        by_page, by_token, by_head = (stride // width for stride in raw.stride()[:3])
        last = (raw.shape[0] - 1) * by_page + (page_size - 1) * by_token + (kv_heads - 1) * by_head
        token = torch.arange(page_size, device=cache.device) * by_token
        head = torch.arange(kv_heads, device=cache.device).view(-1, 1, 1) * by_head
        rows = pages[..., None, :, None] * by_page + token + head  # [..., KH, P, page_size]
        into = scratch(tag, (rows.numel(), width), raw.dtype, cache.device)
        torch.index_select(raw.as_strided((last + 1, width), (width, 1)), 0, rows.reshape(-1), out=into)
        by_heads = into.view(cache.dtype).view(*pages.shape[:-1], kv_heads, -1, width)
        return by_heads.transpose(-3, -2)
    into = scratch(tag, (count, *cache.shape[1:]), raw.dtype, cache.device)
    torch.index_select(raw, 0, pages.reshape(-1), out=into)
    return into.view(cache.dtype).view(*pages.shape[:-1], -1, kv_heads, width)


def nhd(cache: Tensor, kv_layout: str) -> Tensor:
    """A cache of either layout as [num_pages, page_size, KH, D]."""
    return cache.transpose(1, 2) if kv_layout == "HND" else cache


def widened(tag: str, tensor: Tensor, scale: Scale, dtype: torch.dtype) -> Tensor:
    """[..., KH, D] in `dtype`, times its scale: none, one, or one per KV head.

    A tensor that is already so is returned; else the result is in scratch memory of that tag.
    """
    if tensor.dtype is dtype and scale is None:
        return tensor
    into = scratch(tag, tensor.shape, dtype, tensor.device)
    if tensor.dtype is torch.float8_e4m3fn and tensor.device.type == "cpu":
        e4m3_values(tag, tensor, into)
    elif tensor.dtype is torch.float8_e5m2 and tensor.device.type == "cpu":
        e5m2_values(tag, tensor, into)
    else:
        into.copy_(tensor)
    if scale is not None:
        into.mul_(scale.to(dtype).reshape(-1, 1) if isinstance(scale, Tensor) else scale)
    return into


def e4m3_values(tag: str, tensor: Tensor, into: Tensor) -> None:
    """Copy float8_e4m3fn values into a wider float, exactly.

    The CPU's own conversion takes one element at a time. Sign-extended to 16 bits and shifted by 7, an e4m3
    number's bits are those of the float16 that is 256 times smaller, but for a second copy of the sign: 5 times
    faster (2 cores, torch 2.13). NaN, all ones but for the sign, is the one that differs.
    """
    signed, raw = tensor.view(torch.int8), tensor.view(torch.uint8)
    bits = scratch(f"{tag} bits", tensor.shape, torch.int16, tensor.device)
    bits.copy_(signed).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    into.copy_(bits.view(torch.float16)).mul_(256.0)
    if tensor.numel() and (int(signed.max()) == 0x7F or int(raw.max()) == 0xFF):
        into.masked_fill_((raw & 0x7F) == 0x7F, torch.nan)


def e5m2_values(tag: str, tensor: Tensor, into: Tensor) -> None:
    """Copy float8_e5m2 values into a wider float: its bits are the upper ones of a float16."""
    bits = scratch(f"{tag} bits", tensor.shape, torch.int16, tensor.device)
    into.copy_(bits.copy_(tensor.view(torch.int8)).bitwise_left_shift_(8).view(torch.float16))
