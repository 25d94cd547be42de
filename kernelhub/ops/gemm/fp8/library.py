"""The op under torch.compile, torch.export and fake tensors; see `kernelhub.ops.attention.library`."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import plain
from kernelhub.ops.operators import define, names_of


def fp8_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """`kernelhub.fp8_gemm` through its operator."""
    operands = (a, b, a_scale, b_scale, bias, out_dtype, names_of(backend))
    ops = torch.ops.kernelhub
    if out is None:
        made: Tensor = ops.fp8_gemm.default(*operands)
        return made
    ops.fp8_gemm_out.default(*operands, out)
    return out


def _functional(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    backend: list[str] | None,
) -> Tensor:
    from kernelhub.ops.gemm.fp8.fp8_gemm import fp8_gemm as eager

    bias = None if bias is None else plain(bias)
    return eager(
        plain(a),
        plain(b),
        None if a_scale is None else plain(a_scale),
        plain(b_scale),
        bias,
        out_dtype,
        backend=backend,
    )


def _mutating(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    backend: list[str] | None,
    out: Tensor,
) -> None:
    from kernelhub.ops.gemm.fp8.fp8_gemm import fp8_gemm as eager

    bias = None if bias is None else plain(bias)
    eager(
        plain(a), plain(b), None if a_scale is None else plain(a_scale), plain(b_scale), bias, out_dtype, out, backend
    )


def _fake(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    backend: list[str] | None,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


_ARGUMENTS = "Tensor a, Tensor b, Tensor? a_scale, Tensor b_scale, Tensor? bias, ScalarType out_dtype, str[]? backend"
define(f"fp8_gemm({_ARGUMENTS}) -> Tensor", _functional, _fake)
define(f"fp8_gemm_out({_ARGUMENTS}, Tensor(a!) out) -> ()", _mutating)
