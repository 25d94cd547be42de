"""The op under torch.compile, torch.export and fake tensors; see `kernelhub.ops.attention.library`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import plain
from kernelhub.ops.gemm.grouped.call import default_out_dtype
from kernelhub.ops.operators import define, names_of


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    *,
    offsets: Tensor | None = None,
    group_sizes: Tensor | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    a_global_scale: Tensor | None = None,
    b_global_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """`kernelhub.grouped_gemm` through its operator."""
    names = names_of(backend)
    operands = (a, b, offsets, group_sizes, a_scale, b_scale, a_global_scale, b_global_scale, bias)
    ops = torch.ops.kernelhub
    if out is None:
        made: Tensor = ops.grouped_gemm.default(*operands, out_dtype or default_out_dtype(a.dtype), names)
        return made
    ops.grouped_gemm_out.default(*operands, out_dtype or out.dtype, names, out)
    return out


def _run(
    a: Tensor,
    b: Tensor,
    offsets: Tensor | None,
    group_sizes: Tensor | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    a_global_scale: Tensor | None,
    b_global_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    backend: list[str] | None,
    out: Tensor | None = None,
) -> Tensor:
    from kernelhub.ops.gemm.grouped.grouped_gemm import grouped_gemm as eager

    return eager(
        plain(a),
        b,
        offsets=offsets,
        group_sizes=group_sizes,
        a_scale=a_scale,
        b_scale=b_scale,
        a_global_scale=a_global_scale,
        b_global_scale=b_global_scale,
        bias=bias,
        out_dtype=out_dtype,
        out=out,
        backend=backend,
    )


def _mutating(*arguments: Any) -> None:
    _run(*arguments)


def _fake(a: Tensor, b: Tensor, *rest: object) -> Tensor:
    out_dtype = rest[7]
    assert isinstance(out_dtype, torch.dtype)
    return a.new_empty((*a.shape[:-1], b.shape[1]), dtype=out_dtype)


_OPERANDS = (
    "Tensor a, Tensor b, Tensor? offsets, Tensor? group_sizes, Tensor? a_scale, Tensor? b_scale,"
    " Tensor? a_global_scale, Tensor? b_global_scale, Tensor? bias, ScalarType out_dtype, str[]? backend"
)
define(f"grouped_gemm({_OPERANDS}) -> Tensor", _run, _fake)
define(f"grouped_gemm_out({_OPERANDS}, Tensor(a!) out) -> ()", _mutating)
