"""Scales of e8m0 reach 2^127, so elements in mxfp4 and mxfp8 reach 6 and 448 times that, beyond float32 and bfloat16.

A product with such an element is what the numbers say: finite where the other factor is small, 0 with 0, infinite with
the right sign where all terms have it. Sums are formed in float32, so terms of both signs whose sizes add up to 2^128
and more may leave NaN, as of any product of matrices.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.ops.formats import E8M0, to_e4m3
from kernelhub.ops.moe.experts.inputs import moe_inputs
from tests.conftest import DEVICE

pytestmark = pytest.mark.device

K = 64
EXPONENTS = (254, 254, 253, 252, 250, 130, 127, 0)  # of the weights' rows, as bytes
N = len(EXPONENTS)


def codes(rows: int, seed: int) -> Tensor:
    """float4 codes [rows, K / 2], all of them, in each group the largest; of odd rows none below 0."""
    made = torch.randint(0, 256, (rows, K // 2), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    made[:, ::16] = 0xF7  # 6 and -6
    made[1::2] &= 0x77
    return made


def scales(exponents: tuple[int, ...], rows: int) -> Tensor:
    column = torch.tensor(exponents, dtype=torch.uint8).repeat(-(-rows // len(exponents)))[:rows].unsqueeze(1)
    return column.repeat(1, K // 32).view(E8M0)


def activations(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows that bring sums back into range, rows that do not, rows of zeros; of odd rows none below 0."""
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(2))
    x *= torch.tensor([2.0**-14, 2.0**-5, 2.0**-6, 0.5, 0.0]).repeat(-(-rows // 5))[:rows].unsqueeze(1)
    x[:, 5::7] = 0.0
    x[1::2] = x[1::2].abs()
    return x.to(dtype)


def quantised(form: str, rows: int) -> dict[str, Tensor]:
    """a with its scales."""
    if form == "fp8":
        return {"a": to_e4m3(activations(rows)), "a_scale": torch.full((1,), 0.5)}
    if form == "mxfp4":
        return {"a": codes(rows, 3), "a_scale": scales((254, 254, 100, 127, 0), rows)}
    if form == "mxfp8":
        a = to_e4m3(activations(rows).sign() * 448.0)
        return {"a": a, "a_scale": scales((254, 254, 100, 127, 0), rows)}
    return {"a": activations(rows, getattr(torch, form))}


def without_signs(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    changed = dict(arguments)
    for name in ("a", "b"):
        values = arguments[name]
        if values.dtype is torch.uint8:
            changed[name] = values & 0x77
        else:
            changed[name] = values.float().abs().to(values.dtype)
    return changed


def is_right(made: Tensor, want: Tensor, sizes: Tensor) -> None:
    """`sizes`: sums of the terms' sizes."""
    largest = torch.finfo(made.dtype).max
    certain = (sizes < 2.0**128) | (want.abs() > 0.99 * sizes)
    assert bool(certain.float().mean() > 0.5)
    assert not made[certain].isnan().any()
    far = certain & (want.abs() >= 2.0**128)
    assert bool(far.any())
    assert torch.equal(made.double()[far], want[far].sign() * torch.inf)
    near = certain & (want.abs() < largest)
    allowed = 2.0**-8 * want.abs() + 2.0**-17 * sizes + 2 * torch.finfo(made.dtype).tiny
    wrong = (made.double() - want).abs() > allowed
    assert not wrong[near].any()


def check(op: str, arguments: dict[str, Tensor], **how: Any) -> None:
    arguments = {name: value.to(DEVICE) for name, value in arguments.items()}
    reference = getattr(kernelhub, op).reference
    want = reference(**arguments, dtype=torch.float64)
    sizes = reference(**without_signs(arguments), dtype=torch.float64)
    is_right(getattr(kernelhub, op)(**arguments, **how), want, sizes)


@pytest.mark.parametrize("kernel", ["torch.dequantized", "triton.fp4_gemm"])
@pytest.mark.parametrize(
    ("a_format", "rows"),
    [("bfloat16", 512), *itertools.product(("bfloat16", "float16", "fp8", "mxfp8", "mxfp4"), (7, 69))],
)
def test_fp4_gemm(a_format: str, rows: int, kernel: str) -> None:
    """512 rows: the weight is decoded once for cuBLAS."""
    weight = {"b": codes(N, 1), "b_scale": scales(EXPONENTS, N)}
    check("fp4_gemm", weight | quantised(a_format, rows), backend=kernel, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [7, 130])
@pytest.mark.parametrize("kernel", ["torch.dequantized", "triton.fp8_gemm"])
def test_fp8_gemm(kernel: str, rows: int) -> None:
    """130 rows: both operands are decoded for cuBLAS."""
    b = to_e4m3(activations(16).sign() * 448.0)
    arguments = quantised("mxfp8", rows) | {"b": b, "b_scale": scales(EXPONENTS, 16)}
    check("fp8_gemm", arguments, backend=kernel, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("kernel", ["torch.per_group", "triton.grouped"])
@pytest.mark.parametrize(
    ("a_format", "b_format"),
    [("bfloat16", "mxfp4"), ("float16", "mxfp4"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp4"), ("mxfp8", "mxfp8")],
)
def test_grouped_gemm(a_format: str, b_format: str, kernel: str) -> None:
    b = codes(N, 1) if b_format == "mxfp4" else to_e4m3(activations(N).sign() * 448.0)
    of_groups = {"b": b.expand(2, *b.shape).contiguous(), "b_scale": scales(EXPONENTS, N).repeat(2, 1, 1)}
    offsets = {"offsets": torch.tensor([3, 10], dtype=torch.int32)}
    arguments = quantised(a_format, 10) | of_groups | offsets
    check("grouped_gemm", arguments, backend=kernel, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("kernel", ["torch.experts", "triton.experts", "cpp.experts"])
@pytest.mark.parametrize("side", ["w13", "w2"])
def test_fused_moe(side: str, kernel: str) -> None:
    """Weights of up to 6 x 2^127 beside activations that bring the sums back, some of which are 0."""
    sizes = {"num_experts": 2, "top_k": 2, "hidden_size": 64, "intermediate_size": 64}
    arguments = moe_inputs(tokens=3, weights="mxfp4", **sizes)
    power = {"w13": (254, 90, -118), "w2": (70, 254, 0)}[side]
    for name, byte in zip(("w13_scale", "w2_scale"), power[:2], strict=True):
        arguments[name].view(torch.uint8).fill_(byte)
    arguments["x"] *= 2.0 ** power[2]
    arguments["x"][:, ::5] = 0.0
    arguments = {name: value.to(DEVICE) for name, value in arguments.items()}
    if kernel == "cpp.experts" and DEVICE != "cpu":
        pytest.skip("cpp.experts runs on a CPU: two cases")
    want = kernelhub.fused_moe.reference(**arguments, dtype=torch.float64)
    made = kernelhub.fused_moe(**arguments, backend=kernel)
    assert made.isfinite().all()
    assert (made.double() - want).norm() < 2.0**-7 * want.norm()
