"""cuDNN's attention as FlashInfer calls it, in torch on a CPU: its graphs are kept, with what they were made for.

Of pages all is multiplied that tiles of 128 tokens reach, what is masked by weights of zero, so that NaN there is met;
but not by the kernel for one query.
Sequences without keys get NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.precision import without_autocast
from tests.backends.fake.addresses import check_small

CUDNN_AVAILABLE = True
GRAPHS: dict[Any, Any] = {}
_old = False  # whether graphs are told apart by shapes alone


@contextmanager
def of_0_6() -> Iterator[None]:
    """The functions as they were before 0.7.1."""
    global _old
    _old = True
    try:
        yield
    finally:
        _old = False
        GRAPHS.clear()


def backend_version() -> int:
    return 91900


def _graph(shapes: Any, baked: Any) -> Any:
    """What the graph of a call was made for."""
    return GRAPHS.setdefault(shapes if _old else (shapes, baked), baked)


def _check(q: Tensor, workspace: Tensor, lens: Tensor, out: Tensor) -> None:
    assert q.is_contiguous()
    assert q.stride() == (q.shape[1] * q.shape[2], q.shape[2], 1), "strides are baked, of what is 1 wide, too"
    assert workspace.dtype is torch.uint8
    assert workspace.numel() >= 128 << 20
    assert lens.dtype is torch.int32
    assert lens.shape == (lens.shape[0], 1, 1, 1)
    check_small(lens)
    assert out.is_contiguous()
    assert out.dtype is q.dtype
    for tensor in (q, out):
        assert tensor.data_ptr() % 16 == 0


def _check_pages(k: Tensor, v: Tensor, table: Tensor, most: int) -> None:
    page_size = k.shape[2]
    check_small(table)
    assert page_size & (page_size - 1) == 0
    assert k.shape[:3] == v.shape[:3]
    for cache in (k, v):
        assert cache.stride(3) == 1
        assert all(step % 8 == 0 for step in cache.stride()[:3])
        assert cache.data_ptr() % 16 == 0
    assert table.dtype is torch.int32
    assert table.is_contiguous()
    assert table.shape[1] == -(-most // page_size), "block table size must equal ceil(s_kv/block_size)"
    assert (table >= 0).all()
    assert (table < k.shape[0]).all()


def _tiles(cache: Tensor, strides: Any, pages: Tensor, length: int) -> Tensor:
    """[tokens, heads, width] of a sequence: whole tiles."""
    page_size = cache.shape[2]
    pages = pages[: -(-length // 128) * max(1, 128 // page_size)]
    there = cache.as_strided(cache.shape, strides, cache.storage_offset())
    return there[pages.long()].transpose(1, 2).flatten(0, 1)


@without_autocast  # which compiled code does not meet
def _attend(q: Tensor, k: Tensor, v: Tensor, keys: int, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """[T, H, DV], and a natural LSE of [T, H]."""
    if not keys:
        return q.new_full((*q.shape[:2], v.shape[2]), torch.nan), torch.full(q.shape[:2], torch.nan)
    group = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    place = torch.arange(len(k))
    seen = (place < keys).expand(len(q), -1)
    if causal:
        seen = seen & (place <= torch.arange(len(q))[:, None] + keys - len(q))
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(2)
    weights = (scores - lse[..., None]).exp().masked_fill(lse[..., None] == -torch.inf, 0.0)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype), lse.t()


def cudnn_batch_decode_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    workspace_buffer: Tensor,
    *,
    max_sequence_kv: int,
    actual_seq_lens_kv: Tensor,
    block_tables: Tensor,
    out: Tensor,
) -> Tensor:
    _check(q, workspace_buffer, actual_seq_lens_kv, out)
    _check_pages(k_cache, v_cache, block_tables, max_sequence_kv)
    assert scale > 0
    assert len(q) == len(block_tables) == len(actual_seq_lens_kv)
    shapes = ("decode", max_sequence_kv, q.shape, k_cache.shape)
    baked = (scale, torch.bfloat16 if _old else q.dtype, k_cache.stride(), v_cache.stride())
    scale, dtype, k_strides, v_strides = _graph(shapes, baked)
    for i, length in enumerate(actual_seq_lens_kv.view(-1).tolist()):
        k, v = (
            _tiles(cache.view(dtype), strides, block_tables[i], length)[:length]
            for cache, strides in ((k_cache, k_strides), (v_cache, v_strides))
        )
        out.view(dtype)[i] = _attend(q[i : i + 1].view(dtype), k, v, length, scale, False)[0][0]
    return out


def cudnn_batch_prefill_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    workspace_buffer: Tensor,
    *,
    max_token_per_sequence: int,
    max_sequence_kv: int,
    actual_seq_lens_q: Tensor,
    actual_seq_lens_kv: Tensor,
    block_tables: Tensor | None = None,
    causal: bool,
    return_lse: bool,
    batch_offsets_q: Tensor,
    batch_offsets_o: Tensor,
    batch_offsets_k: Tensor | None = None,
    batch_offsets_v: Tensor | None = None,
    batch_offsets_stats: Tensor | None = None,
    out: Tensor,
    lse: Tensor | None = None,
    lse_base: str = "log2",
) -> tuple[Tensor, Tensor | None]:
    _check(q, workspace_buffer, actual_seq_lens_kv, out)
    heads, sequences = q.shape[1], len(actual_seq_lens_q)
    assert scale > 0
    assert max_sequence_kv >= max_token_per_sequence > 1, "a graph for one query leaves an LSE unwritten"
    assert return_lse is (lse is not None) is (batch_offsets_stats is not None)
    if lse is not None:
        padded = (sequences, max_token_per_sequence, heads)
        assert lse.shape == (padded if _old else (len(q), heads))
        assert lse.is_contiguous()
    shapes = ("prefill", sequences, q.dtype, max_token_per_sequence, max_sequence_kv, q.shape[1:], k_cache.shape[1:])
    shapes += (block_tables is not None, return_lse, causal)
    baked = (scale, k_cache.stride(), v_cache.stride())
    scale, k_strides, v_strides = _graph(shapes, baked)
    if block_tables is not None:
        _check_pages(k_cache, v_cache, block_tables, max_sequence_kv)

    def begins(offsets: Tensor | None, row: int) -> list[int]:
        assert offsets is not None
        assert offsets.shape == (sequences + 1, 1, 1, 1)
        assert offsets.dtype in (torch.int32, torch.int64)
        assert (offsets % row == 0).all()
        return (offsets.view(-1) // row).tolist()

    at = begins(batch_offsets_q, q.shape[1] * q.shape[2])
    assert at == begins(batch_offsets_o, heads * v_cache.shape[-1])
    lengths = actual_seq_lens_kv.view(-1).tolist()
    assert torch.equal(actual_seq_lens_q.view(-1), torch.tensor(at).diff().int())
    for i, length in enumerate(lengths):
        rows = slice(at[i], at[i + 1])
        assert at[i + 1] - at[i] <= max_token_per_sequence
        assert length <= max_sequence_kv
        if at[i + 1] == at[i]:
            continue
        if block_tables is None:
            assert k_cache.is_contiguous()
            assert v_cache.is_contiguous()
            k_at, v_at = (
                begins(offsets, cache.shape[1] * cache.shape[2])
                for offsets, cache in ((batch_offsets_k, k_cache), (batch_offsets_v, v_cache))
            )
            assert k_at == v_at
            k, v = (cache[k_at[i] : k_at[i] + length] for cache in (k_cache, v_cache))
        else:
            k, v = (
                _tiles(cache, strides, block_tables[i], length)
                for cache, strides in ((k_cache, k_strides), (v_cache, v_strides))
            )
        made, stats = _attend(q[rows], k, v, length, scale, causal)
        out[rows] = made
        if lse is not None:
            assert begins(batch_offsets_stats, heads) == at
            lse.view(-1, heads)[rows] = stats
    if lse is not None and not _old and lse_base == "log2":
        lse.mul_(1 / math.log(2.0))
    return out, lse
