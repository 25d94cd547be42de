"""The op under torch.compile, torch.export and fake tensors; see `kernelhub.ops.attention.library`.

A packed weight crosses the operator as its tensors and what tells them: layout, kernel, format and shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import plain
from kernelhub.ops.operators import define, names_of
from kernelhub.ops.packed import PackedWeight

Names = list[str] | None


def fp4_gemm(
    a: Tensor,
    b: Tensor | PackedWeight,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    a_global_scale: Tensor | None = None,
    b_global_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """`kernelhub.fp4_gemm` through its operator."""
    about: list[str] = []
    n = b.shape[0]
    if isinstance(b, PackedWeight):
        about = [b.layout, b.kernel, str(b.facts["format"]), str(b.shape[0]), str(b.shape[1])]
        codes, b_scale, b_global_scale = (b.tensors[name] for name in ("codes", "scale", "global_scale"))
        assert codes is not None
    else:
        codes = b
    operands = (a, codes, a_scale, b_scale, a_global_scale, b_global_scale, bias)
    ops, names = torch.ops.kernelhub, names_of(backend)
    if out is None:
        made: Tensor = ops.fp4_gemm.default(*operands, n, about, out_dtype, names)
        return made
    ops.fp4_gemm_out.default(*operands, n, about, out_dtype, names, out)
    return out


def _run(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    a_global_scale: Tensor | None,
    b_global_scale: Tensor | None,
    bias: Tensor | None,
    n: int,
    about: list[str],
    out_dtype: torch.dtype,
    backend: Names,
    out: Tensor | None = None,
) -> Tensor:
    from kernelhub.ops.gemm.fp4.op import fp4_gemm as eager

    weight: Tensor | PackedWeight = plain(b)
    if about:
        layout, kernel, form, rows, columns = about
        tensors = {"codes": plain(b), "scale": b_scale, "global_scale": b_global_scale}
        shape = (int(rows), int(columns))
        weight = PackedWeight(layout, "fp4_gemm", kernel, tensors, shape, torch.uint8, {"format": form})
        b_scale = b_global_scale = None
    return eager(plain(a), weight, a_scale, b_scale, a_global_scale, b_global_scale, bias, out_dtype, out, backend)


def _run_out(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    a_global_scale: Tensor | None,
    b_global_scale: Tensor | None,
    bias: Tensor | None,
    n: int,
    about: list[str],
    out_dtype: torch.dtype,
    backend: Names,
    out: Tensor,
) -> None:
    _run(a, b, a_scale, b_scale, a_global_scale, b_global_scale, bias, n, about, out_dtype, backend, out)


def _memory(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    a_global_scale: Tensor | None,
    b_global_scale: Tensor | None,
    bias: Tensor | None,
    n: int,
    about: list[str],
    out_dtype: torch.dtype,
    backend: Names,
) -> Tensor:
    return a.new_empty((*a.shape[:-1], n), dtype=out_dtype)


_OPERANDS = (
    "Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? a_global_scale, Tensor? b_global_scale, "
    "Tensor? bias, int n, str[] about, ScalarType out_dtype, str[]? backend"
)
define(f"fp4_gemm({_OPERANDS}) -> Tensor", _run, _memory)
define(f"fp4_gemm_out({_OPERANDS}, Tensor(a!) out) -> ()", _run_out)
