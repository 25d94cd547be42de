"""CUTLASS's attention for Blackwell as FlashInfer calls it, in torch on a CPU, with what the sources assume unchecked.

Prefill takes tiles from tables, writes what lies before the result, and masks by -inf. Latent attention has one factor
of scores, reads rows of a tile that are no tokens, and multiplies them by zero.
"""

from __future__ import annotations

import math
import types
from typing import Any

import torch
from torch import Tensor

from tests.backends.fake.addresses import check_small
from tests.backends.fake.flashinfer_attention import check_out, check_rows

_TILE = 256
LATENT_CALLS: list[tuple[Tensor, Tensor]] = []  # the cache and the table of each launch


def get_fmha_module(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
    device: torch.device,
) -> Any:
    assert dtype_q is dtype_kv is dtype_o
    assert dtype_q in (torch.float16, torch.bfloat16)
    assert dtype_idx is torch.int32
    assert (head_dim_qk, head_dim_vo) in ((64, 64), (128, 128), (192, 128))
    assert (pos_encoding_mode, use_sliding_window, use_logits_soft_cap) == (0, False, False)
    return types.SimpleNamespace(plan=_plan)


def _plan(
    qo_segment_offsets: Tensor,
    kv_segment_offsets: Tensor,
    work_indptr: Tensor,
    qo_tile_indices: Tensor,
    head_indices: Tensor,
    batch_indices: Tensor,
    qo_tile_size: int,
    num_heads: int,
    num_buckets: int,
    causal: bool,
) -> None:
    assert qo_tile_size == _TILE
    assert work_indptr.shape == (num_buckets + 1,)
    lengths = qo_segment_offsets.diff().tolist()
    items = [
        (tile, head, sequence)
        for head in range(num_heads)
        for sequence, length in enumerate(lengths)
        for tile in reversed(range(-(-length // _TILE)))
    ]
    for place, table in enumerate((qo_tile_indices, head_indices, batch_indices)):
        assert table.dtype is torch.int32
        assert len(items) <= table.numel(), "memory behind the table is written"
        table[: len(items)] = torch.tensor([item[place] for item in items], dtype=torch.int32)
    work_indptr[:] = torch.linspace(0, len(items), num_buckets + 1).int()


def fmha_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_segment_offsets: Tensor,
    kv_segment_offsets: Tensor,
    plan_info: Any = None,
    max_qo_len: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    causal: bool = False,
    sm_scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    assert plan_info is not None, "made anew at each launch"
    assert max_qo_len is not None, "fetched from the device"
    assert out is not None
    assert sm_scale is not None
    assert sm_scale > 0, "the largest score is looked for before it is multiplied"
    check_rows(q, k, v)
    check_small(qo_segment_offsets, kv_segment_offsets, *plan_info)
    check_out(out, (*q.shape[:2], v.shape[2]), q.dtype)
    assert lse is None or (lse.shape == q.shape[:2] and lse.is_contiguous() and lse.dtype is torch.float32)
    starts, key_starts = qo_segment_offsets.tolist(), kv_segment_offsets.tolist()
    assert (starts[-1], key_starts[-1]) == (q.shape[0], k.shape[0]), "what follows would be read, and may be NaN"
    assert max_qo_len == max(qo_segment_offsets.diff().tolist())
    assert max_qo_len * out[0].numel() < 1 << 31, "the address before the result is counted by an int"
    before = max(max_qo_len, 128)
    assert out.storage_offset() >= before * out.stride(0), "rows before the result are not free"
    out.as_strided((before, *out.shape[1:]), out.stride(), out.storage_offset() - before * out.stride(0)).fill_(
        torch.nan
    )
    first, *entries = plan_info
    listed: dict[tuple[int, int], list[int]] = {}
    for tile, head, i in zip(*(table[: int(first[-1])].tolist() for table in entries), strict=True):
        listed.setdefault((i, tile), []).append(head)
    assert len(listed) == sum(-(-length // _TILE) for length in qo_segment_offsets.diff().tolist())
    made = [_attended(q, k, v, starts, key_starts, i, causal, sm_scale) for i in range(len(starts) - 1)]
    for (i, tile), heads in listed.items():
        assert sorted(heads) == list(range(q.shape[1])), "each head once"
        rows = slice(starts[i] + tile * _TILE, min(starts[i] + (tile + 1) * _TILE, starts[i + 1]))
        mine = slice(tile * _TILE, tile * _TILE + rows.stop - rows.start)
        out[rows] = made[i][0][mine].to(out.dtype)
        if lse is not None:
            lse[rows] = made[i][1][mine]
    return out, lse


def _attended(
    q: Tensor, k: Tensor, v: Tensor, starts: list[int], key_starts: list[int], i: int, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """A sequence's result and LSE to base 2; values of a tile that belong to others are multiplied by zero."""
    q = q[starts[i] : starts[i + 1]].float()
    own = key_starts[i + 1] - key_starts[i]
    assert len(q) > 0, "a sequence without queries"
    assert own > 0, "a sequence without keys"
    assert not causal or len(q) <= own, "more queries than keys"
    whole = slice(key_starts[i], key_starts[i] + -(-own // 128) * 128)
    k, v = (tensor[whole].float().repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q, k)
    key = torch.arange(len(k))
    position = torch.arange(len(q))[:, None] + own - len(q)
    hidden = (key >= own) | ((key > position) & causal)
    scores = torch.where(hidden[:, None], -torch.inf, scores) * sm_scale
    return torch.einsum("qhk,khd->qhd", torch.softmax(scores, 2), v), torch.logsumexp(scores, 2) / math.log(2.0)


def get_mla_module() -> Any:
    return types.SimpleNamespace(cutlass_mla_paged_attention=_latent)


def _latent(
    workspace: Tensor,
    out: Tensor,
    lse: Tensor,
    q_nope_pe: Tensor,
    ckv_kpe_cache: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    o_scale: float,
) -> None:
    """Read by the strides of tensors without gaps, whatever theirs are."""
    check_rows(q_nope_pe, ckv_kpe_cache)
    batch, heads, width = q_nope_pe.shape
    pages, page_size, _ = ckv_kpe_cache.shape
    assert (heads, width, ckv_kpe_cache.shape[2]) == (128, 576, 576)
    assert q_nope_pe.dtype is ckv_kpe_cache.dtype
    assert q_nope_pe.dtype in (torch.float16, torch.bfloat16)
    check_out(out, (batch, 128, 512), q_nope_pe.dtype)
    assert lse.dtype is torch.float32
    assert o_scale == 1.0
    check_small(q_nope_pe, ckv_kpe_cache, kv_lens, page_table)
    assert kv_lens.dtype is page_table.dtype is torch.int32
    assert kv_lens.shape == (batch,)
    assert page_table.shape[0] == batch
    assert page_size in (1, 2, 4, 8, 16, 32, 64, 128)
    assert page_table.shape[1] * page_size % 128 == 0
    assert workspace.dtype is torch.uint8
    assert workspace.numel() >= 160 * 128 * 513 * 4
    assert (kv_lens > 0).all(), "divided by"
    assert int(kv_lens.max()) <= page_table.shape[1] * page_size
    workspace[:64] = 77
    LATENT_CALLS.append((ckv_kpe_cache, page_table))
    for i, length in enumerate(kv_lens.tolist()):
        tiles = -(-length // 128)
        mine = page_table[i, : tiles * 128 // page_size].long()
        assert ((mine >= 0) & (mine < pages)).all(), "pages of the last tile are read, whosever they are"
        keys = ckv_kpe_cache[mine].flatten(0, 1).float()
        scores = q_nope_pe[i].float() @ keys.t()
        scores = torch.where(torch.arange(len(keys)) < length, scores, -torch.inf) * 192**-0.5
        out[i] = (torch.softmax(scores, 1) @ keys[:, :512]).to(out.dtype)


PREFILL: tuple[Any, ...] = (get_fmha_module, fmha_varlen)
LATENT: tuple[Any, ...] = (get_mla_module,)
