"""The op under torch.compile, torch.export and fake tensors; see `kernelhub.ops.attention.library`."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import plain
from kernelhub.ops.operators import define, names_of


def bmm_fp8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """`kernelhub.bmm_fp8` through its operator."""
    operands = (a, b, a_scale, b_scale, out_dtype, names_of(backend))
    ops = torch.ops.kernelhub
    if out is None:
        made: Tensor = ops.bmm_fp8.default(*operands)
        return made
    ops.bmm_fp8_out.default(*operands, out)
    return out


def _functional(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype, backend: list[str] | None
) -> Tensor:
    from kernelhub.ops.gemm.fp8.batched.bmm_fp8 import bmm_fp8 as eager

    return eager(plain(a), plain(b), plain(a_scale), plain(b_scale), out_dtype, backend=backend)


def _mutating(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    out_dtype: torch.dtype,
    backend: list[str] | None,
    out: Tensor,
) -> None:
    from kernelhub.ops.gemm.fp8.batched.bmm_fp8 import bmm_fp8 as eager

    eager(plain(a), plain(b), plain(a_scale), plain(b_scale), out_dtype, out, backend)


def _fake(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype, backend: list[str] | None
) -> Tensor:
    return a.new_empty((*a.shape[:2], b.shape[1]), dtype=out_dtype)


_ARGUMENTS = "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, ScalarType out_dtype, str[]? backend"
define(f"bmm_fp8({_ARGUMENTS}) -> Tensor", _functional, _fake)
define(f"bmm_fp8_out({_ARGUMENTS}, Tensor(a!) out) -> ()", _mutating)
