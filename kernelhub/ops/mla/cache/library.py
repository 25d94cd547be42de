"""The op under torch.compile, torch.export and fake tensors; see `kernelhub.ops.attention.library`."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import plain
from kernelhub.ops.operators import define, names_of


def write_mla_cache(
    kv_c: Tensor,
    k_rope: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: float | Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """`kernelhub.write_mla_cache` through its operator."""
    split = (None, kv_scale) if isinstance(kv_scale, Tensor) else (kv_scale, None)
    torch.ops.kernelhub.write_mla_cache.default(kv_c, k_rope, kv_cache, slot_mapping, *split, names_of(backend))
    return kv_cache


def _run(
    kv_c: Tensor,
    k_rope: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale_value: float | None,
    kv_scale: Tensor | None,
    backend: list[str] | None,
) -> None:
    from kernelhub.ops.mla.cache.write_mla_cache import write_mla_cache as eager

    scale = kv_scale if kv_scale_value is None else kv_scale_value
    eager(plain(kv_c), k_rope, kv_cache, slot_mapping, scale, backend)


define(
    "write_mla_cache(Tensor kv_c, Tensor k_rope, Tensor(a!) kv_cache, Tensor slot_mapping, float? kv_scale_value, "
    "Tensor? kv_scale, str[]? backend) -> ()",
    _run,
)
