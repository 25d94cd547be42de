"""TensorRT-LLM's attention as FlashInfer calls it, in torch on a CPU, with what is not defined left as NaN.

Sequences without queries or keys, and queries that see no key, are errors for the kernels of many queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.backends.fake.addresses import check_small
from tests.backends.fake.flashinfer_attention import attend, check_out, check_rows, paged


def _check_offsets(q_offsets: Tensor, kv_offsets: Tensor, kv_lens: Tensor, most_q: int, most_kv: int) -> None:
    for tensor in (q_offsets, kv_offsets, kv_lens):
        assert tensor.dtype is torch.int32
    check_small(q_offsets, kv_offsets, kv_lens)
    assert torch.equal(kv_offsets.diff(), kv_lens)
    assert q_offsets[0] == kv_offsets[0] == 0
    assert int(q_offsets.diff().max()) == most_q
    assert int(kv_lens.max()) == most_kv
    assert (q_offsets.diff() > 0).all(), "a sequence without queries"
    assert (kv_lens > 0).all(), "a sequence without keys"


def trtllm_batch_context_with_kv_cache(
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    window_left: int = -1,
    out: Tensor | None = None,
    kv_layout: str = "HND",
    sinks: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    k, v = kv_cache
    check_rows(query, k, v)
    assert query.is_contiguous()
    assert out is not None
    check_out(out, query.shape, query.dtype)
    assert k.stride() == v.stride(), "read by one set of strides"
    assert workspace_buffer.dtype is torch.uint8
    assert block_tables.shape[0] == batch_size == len(seq_lens)
    assert block_tables.dtype is torch.int32
    check_small(block_tables, seq_lens)
    assert (block_tables >= 0).all()
    assert causal or window_left < 0
    assert sinks is None or sinks.dtype is torch.float32
    check_small(sinks)
    _check_offsets(cum_seq_lens_q, cum_seq_lens_kv, seq_lens, max_q_len, max_kv_len)
    starts, page_size = cum_seq_lens_q.tolist(), k.shape[2 if kv_layout == "HND" else 1]
    for i, length in enumerate(seq_lens.tolist()):
        mine = slice(starts[i], starts[i + 1])
        assert not causal or mine.stop - mine.start <= length, "more queries than keys"
        pages = block_tables[i, : -(-length // page_size)]
        keys, values = (paged(cache, pages, length, kv_layout) for cache in (k, v))
        made = attend(query[mine], keys, values, bmm1_scale, causal, window_left, 0.0, sinks)[0]
        out[mine] = made * bmm2_scale
    return out


def trtllm_ragged_attention_deepseek(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    workspace_buffer: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    out: Tensor | None = None,
    skip_all_rows_active_check: bool = False,
) -> Tensor:
    assert skip_all_rows_active_check, "lengths would be fetched"
    assert (query.shape[2], key.shape[2], value.shape[2]) == (192, 192, 128)
    check_rows(query, key, value)
    assert query.is_contiguous()
    assert out is not None
    check_out(out, (*query.shape[:2], 128), query.dtype)
    assert workspace_buffer.dtype is torch.uint8
    assert (o_sf_scale, window_left, return_lse) == (1.0, -1, False)
    assert len(seq_lens) == batch_size
    _check_offsets(cum_seq_lens_q, cum_seq_lens_kv, seq_lens, max_q_len, max_kv_len)
    starts, key_starts = cum_seq_lens_q.tolist(), cum_seq_lens_kv.tolist()
    assert (starts[-1], key_starts[-1]) == (query.shape[0], key.shape[0]), "what follows would be read, and may be NaN"
    for i in range(batch_size):
        mine, keys = slice(starts[i], starts[i + 1]), slice(key_starts[i], key_starts[i + 1])
        assert not is_causal or mine.stop - mine.start <= keys.stop - keys.start, "more queries than keys"
        out[mine] = attend(query[mine], key[keys], value[keys], bmm1_scale, is_causal)[0] * bmm2_scale
    return out


def _latent(
    query: Tensor, kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, max_seq_len: int, scale: float, out: Tensor
) -> Tensor:
    check_rows(query, kv_cache)
    assert query.is_contiguous()
    assert query.dtype is kv_cache.dtype is out.dtype is torch.bfloat16
    pages, page_size, width = kv_cache.shape
    assert width == query.shape[-1] == 576
    assert block_tables.dtype is seq_lens.dtype is torch.int32
    check_small(block_tables, seq_lens)
    assert (block_tables >= 0).all()
    assert (block_tables < pages).all()
    assert block_tables.shape[1] % (128 / page_size) == 0
    assert max_seq_len == block_tables.shape[1] * page_size
    for i, length in enumerate(seq_lens.tolist()):
        if length == 0:
            out[i] = torch.nan
            continue
        keys = kv_cache[block_tables[i, : -(-length // page_size)].long()].flatten(0, 1)[:length, None]
        out[i] = attend(query[i], keys, keys[..., :512], scale, True)[0]
    return out


def _listed(
    query: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    counts: Tensor,
    max_seq_len: int,
    topk: int,
    scale: float,
    out: Tensor,
) -> Tensor:
    """One query of each list, which sees as many of its first entries as are counted."""
    check_rows(query)
    assert query.is_contiguous()
    assert kv_cache.is_contiguous(), "the cache is one row of slots"
    assert slots.shape == (query.shape[0], 1, topk)
    assert topk % 4 == 0
    assert max_seq_len == topk
    check_small(slots, counts)
    assert slots.dtype is counts.dtype is torch.int32
    assert (counts > 0).all(), "an empty list is not defined"
    rows = kv_cache.flatten(0, 1)
    for i, count in enumerate(counts.tolist()):
        assert (slots[i, 0, count:] == slots[i, 0, 0]).all(), "what is not counted may be loaded, and must not be NaN"
        keys = rows[slots[i, 0, :count].long(), None]
        out[i] = attend(query[i], keys, keys[..., :512], scale, False)[0]
    return out


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor:
    assert backend == "trtllm-gen"
    assert not return_lse
    assert (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, bmm2_scale) == (128, 512, 64, 1.0)
    assert kv_cache.shape[1] in (32, 64)
    assert workspace_buffer.dtype is torch.uint8
    assert out is not None
    check_out(out, (*query.shape[:-1], 512), torch.bfloat16)
    if sparse_mla_top_k:
        return _listed(query, kv_cache, block_tables, seq_lens, max_seq_len, sparse_mla_top_k, bmm1_scale, out)
    return _latent(query, kv_cache, block_tables, seq_lens, max_seq_len, bmm1_scale, out)


def xqa_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor | None = None,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
) -> Tensor:
    assert (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, bmm2_scale) == (128, 512, 64, 1.0)
    assert query.shape[1:3] == (1, 128)
    assert not workspace_buffer[: 8 << 20].any(), "semaphores are zero"
    workspace_buffer[8 << 20 : (8 << 20) + 64] = 77
    assert out is not None
    check_out(out, (query.shape[0], 128, 512), torch.bfloat16)
    _latent(query, kv_cache, block_tables, seq_lens, max_seq_len, bmm1_scale, out.unsqueeze(1))
    return out


PREFILL: tuple[Any, ...] = (trtllm_batch_context_with_kv_cache, trtllm_ragged_attention_deepseek)
LATENT: tuple[Any, ...] = (trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla)
