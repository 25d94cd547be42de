"""Right numbers for the stand-ins of FlashAttention, with each library's own conventions.

What the real libraries answer with wrong numbers, or with an illegal access, is an error or a NaN here too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernelhub.ops.attention.reference import attention_reference

FEWEST_ROWS, FEWEST_KEYS = 64, (64, 80, 96, 112, 128, 144, 160, 176, 192)


def offsets(lengths: Tensor) -> Tensor:
    assert lengths.dtype is torch.int32
    assert lengths.is_contiguous()
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def check_lse_ends(q, cu_seqlens_q, max_seqlen_q, keys) -> None:
    """Over pages FlashAttention-2 writes +inf past the LSE of ragged queries, where one of them has no keys."""
    queries = cu_seqlens_q.diff().tolist()
    if len(queries) * max_seqlen_q > q.shape[0]:  # else it ends where that of a batch would
        assert all(count for count, asked in zip(keys, queries, strict=True) if asked), "written past the LSE"


def check_bounds(cu_q: Tensor | None, max_q: int | None, cu_k: Tensor | None, max_k: int | None) -> None:
    """Bounds are ints that hold, and come with their offsets."""
    for offsets_of, bound in ((cu_q, max_q), (cu_k, max_k)):
        if offsets_of is not None:
            assert offsets_of.dtype is torch.int32
            assert offsets_of.is_contiguous()
            assert type(bound) is int
            assert bound >= 1
            assert max([0, *offsets_of.diff().tolist()]) <= bound


def check_operands(*tensors: Tensor) -> None:
    """Rows are read 16 bytes at a time; one dtype for all."""
    for tensor in tensors:
        assert tensor.dtype is tensors[0].dtype
        assert tensor.dtype in (torch.float16, torch.bfloat16)
        assert tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension"
        assert tensor.shape[-1] % 8 == 0
        assert tensor.shape[-1] <= 256
        assert tensor.data_ptr() % 16 == 0
        assert all(stride % 8 == 0 for stride in tensor.stride()[:-1])
        assert all(stride > 0 for stride in tensor.stride()[:-1])


def sequences(q: Tensor, k: Tensor, cu_q: Tensor | None, lengths: list[int], table: Tensor | None):
    """(index, rows of q, keys) of each sequence; keys are a slice, or pages and a length."""
    for i, length in enumerate(lengths):
        if cu_q is not None:
            rows = slice(int(cu_q[i]), int(cu_q[i + 1]))
        else:
            rows = i
        yield rows, length, None if table is None else table[i, : -(-length // k.shape[1])].long(), i


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    sinks: Tensor | None,
    empty: float,
    out: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    lengths: list[int] | None,
    table: Tensor | None,
    tail_is_read: bool,
) -> Tensor:
    """Attention of every sequence into `out`; the LSE, [B, H, S] or [H, T], `empty` where a row sees no key."""
    heads = q.shape[-2]
    ragged_lse = q.new_full((heads, q.shape[0]), 777.0, dtype=torch.float32) if cu_q is not None else None
    lse = ragged_lse if ragged_lse is not None else q.new_empty(q.shape[0], heads, q.shape[1], dtype=torch.float32)
    num_seqs = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    if lengths is None:
        lengths = [k.shape[1]] * num_seqs if cu_k is None else cu_k.diff().tolist()
    for rows, length, pages, i in sequences(q, k, cu_q, lengths, table):
        if table is not None:
            keys, values = (cache[pages].flatten(0, 1) for cache in (k, v))
            tail = values[length:]
            keys, values = keys[:length], values[:length]
        elif cu_k is not None:
            keys, values = (t[int(cu_k[i]) : int(cu_k[i + 1])] for t in (k, v))
            tail = v[int(cu_k[-1]) :]
        else:
            keys, values, tail = k[i], v[i], v[i][:0]
        made, found = attention_reference(
            q[rows][None],
            keys[None],
            values[None],
            causal=causal,
            window=window,
            softcap=softcap or None,
            sinks=None if sinks is None else sinks.float(),
            scale=scale,
            return_lse=True,
        )
        if scale <= 0 or (tail_is_read and tail.isnan().any()):
            made = torch.full_like(made, math.nan)
        if sinks is None:
            found = found.masked_fill(found == -math.inf, empty)
        out[rows] = made[0].to(out.dtype)
        if cu_q is None:
            lse[rows] = found[0]
        else:
            lse[:, rows] = found[0]
    return lse


# Of a window and of causal queries: sides that are open, that are wider than there are keys, and neither.
WINDOWS = ((3, -1), (-1, 2), (3, 2), (40, 3), (3, 40), (0, -1), (-1, 0), (5, 0))


def limits_of_fa2(causal, window, bound):
    """What FlashAttention-2 makes of a window: a side as wide as the bound on keys is open, and an open one beside one
    that is not is that bound. Wrong for sequences of more queries than that, as the library is."""
    left, right = (-1 if side >= bound else side for side in window)
    right = 0 if causal else right
    if (left < 0) != (right < 0):
        left, right = (bound if side < 0 else side for side in (left, right))
    return left, right


def fa2(q, k, v, scale, causal, window, softcap, bound, cu_q=None, cu_k=None, table=None):
    """Own result; an LSE of +inf where no key is seen; unused rows of pages are not read."""
    check_operands(q, k, v)
    assert k.shape[-1] == v.shape[-1] == q.shape[-1]
    if table is not None:
        assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        assert table.dtype is torch.int32
        assert table.stride(-1) == 1
    out = q.new_full((*q.shape[:-1], v.shape[-1]), math.nan)
    window = limits_of_fa2(causal, window, bound)
    lse = run(q, k, v, scale, False, window, softcap, None, math.inf, out, cu_q, cu_k, None, table, False)
    return out, lse


def fa4(q, k, v, scale, causal, window, sinks, return_lse, cu_q=None, cu_k=None, seqused_k=None, table=None):
    """Own result; sinks; None for no limit; unused rows of large pages are read."""
    check_operands(q, k, v)
    assert all(side is None or side >= 0 for side in window), "-1 is a limit like any other"
    assert not (causal and window[1] is not None)
    assert (table is None) == (seqused_k is None)
    assert table is None or cu_k is None
    if sinks is not None:
        assert sinks.shape == (q.shape[-2],)
    out = q.new_full((*q.shape[:-1], v.shape[-1]), math.nan)
    sides = tuple(-1 if side is None else side for side in window)
    lengths = None if seqused_k is None else seqused_k.tolist()
    reads_tail = table is not None and k.shape[1] >= min(FEWEST_KEYS)
    tail = reads_tail or table is None  # tiles of values are loaded whole
    lse = run(q, k, v, scale, causal, sides, 0.0, sinks, -math.inf, out, cu_q, cu_k, lengths, table, tail)
    return out, lse if return_lse else None


def fa3_forward(
    q, k, v, k_new, v_new, q_v, out, cu_q, cu_k, cu_k_new, seqused_q, seqused_k, max_q, max_k, table, kv_batch_idx,
    leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, scale, causal, left, right,
    chunk=0, softcap=0.0, rotary_interleaved=False, metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, sinks=None,
):  # fmt: skip
    """Writes into `out`; an LSE of -inf where no key is seen; large pages' unused rows are read for many queries."""
    check_operands(q, k, v, out)
    qk, vo = q.shape[-1], v.shape[-1]
    assert qk == vo or (128 < qk <= 192 and 96 < vo <= 128)
    for unused in (k_new, v_new, q_v, cu_k_new, seqused_q, kv_batch_idx, rotary_cos, metadata, pack_gqa, sinks):
        assert unused is None
    assert (chunk, num_splits, sm_margin) == (0, 0, 0)
    check_bounds(cu_q, max_q, cu_k, max_k)
    assert out.shape == (*q.shape[:-1], vo)
    reads_tail = False
    lengths = None
    if table is not None:
        assert cu_k is None
        assert table.dtype is torch.int32
        assert table.stride(-1) == 1
        assert seqused_k.dtype is torch.int32
        assert seqused_k.is_contiguous()
        assert leftpad_k is None or not leftpad_k.any()
        rows = (max_q if cu_q is not None else q.shape[1]) * q.shape[-2] // k.shape[-2]
        whole_tiles = any(k.shape[1] % keys == 0 for keys in FEWEST_KEYS)
        reads_tail = leftpad_k is None and whole_tiles and rows > FEWEST_ROWS
        lengths = seqused_k.tolist()
    window = (left, right)
    tail = reads_tail or table is None  # tiles of values are loaded whole
    lse = run(q, k, v, scale, causal, window, softcap, None, -math.inf, out, cu_q, cu_k, lengths, table, tail)
    return out, lse, q.new_empty(0), q.new_empty(0)
