"""The op under torch.compile, torch.export and fake tensors; see `kernelhub.ops.attention.library`.

An operator takes tensors only, so a packed weight goes through as its tensors and what else it says of itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import plain
from kernelhub.ops.operators import define, names_of
from kernelhub.ops.packed import PackedWeight


def fp8_gemm(
    a: Tensor,
    b: Tensor | PackedWeight,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """`kernelhub.fp8_gemm` through its operator."""
    n = b.shape[0]
    about: list[str] = []
    codes: Tensor | None
    if isinstance(b, PackedWeight):
        dtype, shape = b.facts["scale"]
        about = [b.layout, b.kernel, *map(str, b.shape), str(dtype)[6:], *map(str, shape)]
        codes, b_scale = b.tensors["codes"], b.tensors["scale"]
    else:
        codes = b
    operands = (a, codes, a_scale, b_scale, bias, n, about, out_dtype, names_of(backend))
    ops = torch.ops.kernelhub
    if out is None:
        made: Tensor = ops.fp8_gemm.default(*operands)
        return made
    ops.fp8_gemm_out.default(*operands, out)
    return out


def _run(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    n: int,
    about: list[str],
    out_dtype: torch.dtype,
    backend: list[str] | None,
    out: Tensor | None = None,
) -> Tensor:
    from kernelhub.ops.gemm.fp8.op import fp8_gemm as eager

    a_scale, b_scale, bias = (None if tensor is None else plain(tensor) for tensor in (a_scale, b_scale, bias))
    weight: Tensor | PackedWeight = plain(b)
    if about:
        layout, kernel, rows, columns, dtype, *shape = about
        facts = {"scale": (getattr(torch, dtype), tuple(map(int, shape)))}
        tensors = {"codes": plain(b), "scale": b_scale}
        sizes = (int(rows), int(columns))
        weight = PackedWeight(layout, "fp8_gemm", kernel, tensors, sizes, torch.float8_e4m3fn, facts)
        b_scale = None
    return eager(plain(a), weight, a_scale, b_scale, bias, out_dtype, out, backend)


def _mutating(*arguments: Any) -> None:
    _run(*arguments)


def _fake(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    n: int,
    about: list[str],
    out_dtype: torch.dtype,
    backend: list[str] | None,
) -> Tensor:
    return a.new_empty((a.shape[0], n), dtype=out_dtype)


_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, int n, str[] about, ScalarType out_dtype, "
    "str[]? backend"
)
define(f"fp8_gemm({_ARGUMENTS}) -> Tensor", _run, _fake)
define(f"fp8_gemm_out({_ARGUMENTS}, Tensor(a!) out) -> ()", _mutating)
