"""Attention inputs with the shapes of real models, for tests, benchmarks and the demo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.models.shapes import ATTENTION, AttentionModel


def attention_inputs(
    model: AttentionModel | str = "llama-3.1-8b",
    *,
    batch: int = 1,
    q_tokens: int = 128,
    kv_tokens: int | None = None,
    q_lens: Sequence[int] | None = None,
    kv_lens: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    generator: torch.Generator | None = None,
) -> dict[str, Any]:
    """Arguments of a causal `attention` call of one layer, with the model's features.

    Args:
        batch, q_tokens, kv_tokens: q is [batch, q_tokens, H, D], k and v [batch, kv_tokens, KH, D or DV];
            kv_tokens is q_tokens unless given.
        q_lens, kv_lens: instead, ragged sequences of these lengths, q_lens if only that is given.
        dtype: of q. Values are drawn from a normal distribution.
        kv_dtype: that of q unless given; for float8, k and v come with float scales.
        seed: equal seeds give equal tensors on every device.
        generator: draws in its stead, on its own device: faster for large tensors of a GPU.
    """
    model = ATTENTION[model] if isinstance(model, str) else model
    draw = _Draw(generator or torch.Generator(device="cpu").manual_seed(seed), device)
    offsets: dict[str, Any] = {}
    if q_lens is None:
        q_shape: tuple[int, ...] = (batch, q_tokens)
        kv_shape: tuple[int, ...] = (batch, q_tokens if kv_tokens is None else kv_tokens)
    else:
        kv_lens = q_lens if kv_lens is None else kv_lens
        q_shape, kv_shape = (sum(q_lens),), (sum(kv_lens),)
        offsets = {"cu_seqlens_q": draw.offsets(q_lens), "cu_seqlens_k": draw.offsets(kv_lens)}
    arguments: dict[str, Any] = {
        "q": draw.normal((*q_shape, model.num_q_heads, model.head_dim_qk), dtype),
        **draw.keys_and_values("k", "v", (*kv_shape, model.num_kv_heads), model, kv_dtype or dtype),
        **offsets,
        "causal": True,
    }
    return arguments | draw.features(model, dtype)


def paged_attention_inputs(
    model: AttentionModel | str = "llama-3.1-8b",
    *,
    seq_lens: Sequence[int] = (128, 77, 1, 300),
    q_lens: Sequence[int] | int | None = None,
    page_size: int = 16,
    spare_pages: int = 3,
    kv_layout: str = "NHD",
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    generator: torch.Generator | None = None,
) -> dict[str, Any]:
    """Arguments of a `paged_attention` call of one layer, with the model's features.

    Args:
        seq_lens: KV tokens per sequence.
        q_lens: None for decode, one number for as many queries per sequence, or one per sequence for a
            ragged batch.
        page_size: tokens per page. Pages are handed out in random order.
        spare_pages: pages of the cache that belong to no sequence; they and the unused ends of last pages
            hold NaN, so that a kernel that reads past a sequence is seen.
        kv_layout: ``"NHD"`` or ``"HND"``.
        generator: as of `attention_inputs`.
    """
    model = ATTENTION[model] if isinstance(model, str) else model
    draw = _Draw(generator or torch.Generator(device="cpu").manual_seed(seed), device)
    num_seqs = len(seq_lens)
    pages = [-(-length // page_size) for length in seq_lens]
    num_pages = sum(pages) + spare_pages
    order = draw.order(num_pages)[: sum(pages)]
    block_table = torch.full((num_seqs, max([*pages, 1])), -1, dtype=torch.int32, device="cpu")
    for row, used in enumerate(order.split(pages)):
        block_table[row, : len(used)] = used.int()
    caches = draw.keys_and_values(
        "k_cache", "v_cache", (num_pages, page_size, model.num_kv_heads), model, kv_dtype or dtype
    )
    unused = torch.ones(num_pages, page_size, dtype=torch.bool, device="cpu")
    for row, length in enumerate(seq_lens):
        for column in range(pages[row]):
            unused[block_table[row, column], : min(page_size, length - column * page_size)] = False
    for name in ("k_cache", "v_cache"):
        poisoned = caches[name].view(torch.uint8) if caches[name].itemsize == 1 else caches[name]
        poisoned[unused.to(device)] = 0x7F if caches[name].itemsize == 1 else torch.nan
        if kv_layout == "HND":
            caches[name] = caches[name].transpose(1, 2).contiguous()
    if isinstance(q_lens, int):
        q_shape: tuple[int, ...] = (num_seqs, q_lens)
    else:
        q_shape = (num_seqs,) if q_lens is None else (sum(q_lens),)
    arguments: dict[str, Any] = {
        "q": draw.normal((*q_shape, model.num_q_heads, model.head_dim_qk), dtype),
        **caches,
        "block_table": block_table.to(device),
        "seq_lens": torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
        "kv_layout": kv_layout,
    }
    if q_lens is not None and not isinstance(q_lens, int):
        arguments["cu_seqlens_q"] = draw.offsets(q_lens)
    return arguments | draw.features(model, dtype)


class _Draw:
    """Random tensors from one generator: the CPU's, so that every device sees the same, unless the caller gave one."""

    def __init__(self, generator: torch.Generator, device: torch.device | str) -> None:
        self.generator = generator
        self.device = device

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._randn(*shape).to(dtype).to(self.device)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator, device=self.generator.device, dtype=torch.int64).cpu()

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.generator.device, dtype=torch.float32)

    def offsets(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *lengths], dtype=torch.int64, device="cpu").cumsum(0).to(self.device, torch.int32)

    def keys_and_values(
        self, k_name: str, v_name: str, shape: Sequence[int], model: AttentionModel, dtype: torch.dtype
    ) -> dict[str, Any]:
        k = self._randn(*shape, model.head_dim_qk)
        v = self._randn(*shape, model.head_dim_vo)
        if dtype.itemsize != 1:
            return {k_name: k.to(dtype).to(self.device), v_name: v.to(dtype).to(self.device)}
        k_scale, v_scale = 2.0**-6, 2.0**-5  # values up to 4 then use e4m3's range up to 256
        return {
            k_name: (k / k_scale).clamp(-448, 448).to(dtype).to(self.device),
            v_name: (v / v_scale).clamp(-448, 448).to(dtype).to(self.device),
            "k_scale": k_scale,
            "v_scale": v_scale,
        }

    def features(self, model: AttentionModel, dtype: torch.dtype) -> dict[str, Any]:
        features: dict[str, Any] = {}
        if model.window is not None:
            features["window"] = model.window
        if model.softcap is not None:
            features["softcap"] = model.softcap
        if model.sinks:
            features["sinks"] = self.normal((model.num_q_heads,), dtype)
        return features
