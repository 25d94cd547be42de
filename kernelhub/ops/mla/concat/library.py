"""The op under torch.compile, torch.export and fake tensors; see `kernelhub.ops.attention.library`."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import plain
from kernelhub.ops.operators import define, names_of


def concat_mla_k(k_nope: Tensor, k_rope: Tensor, out: Tensor | None = None, backend: Backend = None) -> Tensor:
    """`kernelhub.concat_mla_k` through its operator."""
    names = names_of(backend)
    ops = torch.ops.kernelhub
    if out is None:
        made: Tensor = ops.concat_mla_k.default(k_nope, k_rope, names)
        return made
    ops.concat_mla_k_out.default(k_nope, k_rope, names, out)
    return out


def _functional(k_nope: Tensor, k_rope: Tensor, backend: list[str] | None) -> Tensor:
    from kernelhub.ops.mla.concat.concat_mla_k import concat_mla_k as eager

    return eager(plain(k_nope), k_rope, backend=backend)


def _mutating(k_nope: Tensor, k_rope: Tensor, backend: list[str] | None, out: Tensor) -> None:
    from kernelhub.ops.mla.concat.concat_mla_k import concat_mla_k as eager

    eager(plain(k_nope), k_rope, out, backend=backend)


def _fake(k_nope: Tensor, k_rope: Tensor, backend: list[str] | None) -> Tensor:
    return k_nope.new_empty((*k_nope.shape[:2], k_nope.shape[2] + k_rope.shape[-1]))


define("concat_mla_k(Tensor k_nope, Tensor k_rope, str[]? backend) -> Tensor", _functional, _fake)
define(
    "concat_mla_k_out(Tensor k_nope, Tensor k_rope, str[]? backend, Tensor(a!) out) -> ()",
    _mutating,
)
