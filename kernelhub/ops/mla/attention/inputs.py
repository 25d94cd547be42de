"""Inputs of `mla_attention` with the shapes of real models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.models.shapes import MLA, MlaModel


def mla_attention_inputs(
    model: MlaModel | str = "deepseek-v3",
    *,
    num_heads: int | None = None,
    seq_lens: Sequence[int] = (128, 77, 1, 300),
    q_lens: Sequence[int] | int | None = None,
    topk: int | None = None,
    page_size: int = 64,
    spare_pages: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of a `mla_attention` call of one layer.

    Args:
        num_heads: heads on this rank; all of the model's unless given.
        seq_lens: KV tokens per sequence.
        q_lens: None for decode, one number for as many queries per sequence, or one per sequence for a ragged batch.
        topk: with it `topk_indices` lists as many positions that a query may see, in random order; where there are
            fewer, -1 fills the other places.
        page_size: tokens per page. Pages are handed out in random order.
        spare_pages: pages of the cache that belong to no sequence; they and the unused ends of last pages hold NaN,
            so that a kernel that reads past a sequence is seen.
        dtype: of q. Values are drawn from a normal distribution, those of q so that scores are of order 1.
        kv_dtype: that of q unless given; float8_e4m3fn comes with a float scale.
        seed: equal seeds give equal tensors on every device.
    """
    model = MLA[model] if isinstance(model, str) else model
    heads = model.num_heads if num_heads is None else num_heads
    width = model.kv_lora_rank + model.qk_rope_head_dim
    generator = torch.Generator(device="cpu").manual_seed(seed)
    num_seqs = len(seq_lens)
    pages = [-(-length // page_size) for length in seq_lens]
    num_pages = sum(pages) + spare_pages
    order = torch.randperm(num_pages, generator=generator, device="cpu")[: sum(pages)]
    block_table = torch.full((num_seqs, max([*pages, 1])), -1, dtype=torch.int32, device="cpu")
    unused = torch.ones(num_pages, page_size, dtype=torch.bool, device="cpu")
    for row, used in enumerate(order.split(pages)):
        block_table[row, : len(used)] = used.int()
        for column, page in enumerate(used.tolist()):
            unused[page, : min(page_size, seq_lens[row] - column * page_size)] = False
    kv_cache = torch.randn(num_pages, page_size, width, generator=generator, dtype=torch.float32, device="cpu")
    extra: dict[str, Any] = {}
    if kv_dtype is torch.float8_e4m3fn:
        extra["kv_scale"] = 2.0**-6  # values up to 4 then use e4m3's range up to 256
        kv_cache = (kv_cache / extra["kv_scale"]).clamp(-448, 448).to(kv_dtype)
        kv_cache.view(torch.uint8)[unused] = 0x7F
    else:
        kv_cache = kv_cache.to(dtype)
        kv_cache[unused] = torch.nan
    lengths = [q_lens] * num_seqs if isinstance(q_lens, int) else [1] * num_seqs if q_lens is None else list(q_lens)
    q_shape = (num_seqs, q_lens) if isinstance(q_lens, int) else (sum(lengths),)
    # A row of the cache has length sqrt(width): queries this long give scores of standard deviation 2.
    q = torch.randn(*q_shape, heads, width, generator=generator, dtype=torch.float32, device="cpu") * (
        2 / (model.scale * width**0.5)
    )
    if q_lens is not None and not isinstance(q_lens, int):
        extra["cu_seqlens_q"] = (
            torch.tensor([0, *lengths], dtype=torch.int64, device="cpu").cumsum(0).to(device, torch.int32)
        )
    if topk is not None:
        listed = _topk_indices(seq_lens, lengths, topk, generator)
        extra["topk_indices"] = listed.reshape(*q_shape, topk).to(device)
    return {
        "q": q.to(dtype).to(device),
        "kv_cache": kv_cache.to(device),
        "block_table": block_table.to(device),
        "seq_lens": torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
        "scale": model.scale,
        "value_dim": model.kv_lora_rank,
        **extra,
    }


def _topk_indices(seq_lens: Sequence[int], q_lens: Sequence[int], topk: int, generator: torch.Generator) -> Tensor:
    """[T, topk]: positions up to each query's own, each at most once, -1 where there are no more."""
    listed = torch.full((sum(q_lens), topk), -1, dtype=torch.int32, device="cpu")
    row = 0
    for length, tokens in zip(seq_lens, q_lens, strict=True):
        for position in range(length - tokens, length):
            seen = torch.randperm(max(0, position + 1), generator=generator, device="cpu")[:topk].int()
            listed[row, torch.randperm(topk, generator=generator, device="cpu")[: len(seen)]] = seen
            row += 1
    return listed
