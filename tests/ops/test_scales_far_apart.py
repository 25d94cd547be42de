"""Two scales of a product whose own product is no number of float32: 2^127 beside 2^127 with a sum of 0, or a tiny one.

The result is what the numbers say: 0, or a number, or infinite with the right sign. Sums are formed in float32, so
terms of both signs whose sizes add up to 2^128 and more may leave NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.ops.formats import E8M0, to_e4m3
from tests.conftest import DEVICE

pytestmark = pytest.mark.device

M, N, K = 9, 256, 256
EXPONENTS = (127, 127, 100, 60, 0, -60, -100, -127)  # of scales


def codes(rows: int, seed: int) -> Tensor:
    """Rows of which some are 0, some all but 0, and of odd ones no code is below 0."""
    made = torch.randn(rows, K, generator=torch.Generator().manual_seed(seed)) * 20
    made[::3] = 0.0
    made[::6, 7] = 2.0**-9  # the least number of e4m3
    made[1::2] = made[1::2].abs()
    return to_e4m3(made)


def scale(shape: tuple[int, ...], seed: int, e8m0: bool = False) -> Tensor:
    """Powers of two, with a factor where float32 has room for one."""
    picked = torch.randint(0, len(EXPONENTS), shape, generator=torch.Generator().manual_seed(seed))
    picked.flatten()[1] = 0  # both sides have the largest
    exponents = torch.tensor(EXPONENTS)[picked]
    if e8m0:
        return (exponents + 127).to(torch.uint8).view(E8M0)
    return (torch.where(exponents > -120, 1.37, 1.0).double() * 2.0 ** exponents.double()).float()


def sized(values: Tensor) -> Tensor:
    return (values.float().abs()).to(values.dtype) if values.dtype is torch.float8_e4m3fn else values & 0x77


def ones_of(values: Tensor) -> Tensor:
    return (
        torch.full_like(values.view(torch.uint8), 127).view(E8M0) if values.dtype is E8M0 else torch.ones_like(values)
    )


def check(op: str, arguments: dict[str, Any], kernel: str) -> None:
    """As `ops/gemm/fp8/tolerance.py` has it, in float32."""
    arguments = {name: value.to(DEVICE) for name, value in arguments.items()}
    reference, call = getattr(kernelhub, op).reference, getattr(kernelhub, op)
    want = reference(**arguments, dtype=torch.float64)
    plain = arguments | {name: sized(arguments[name]) for name in ("a", "b")}
    sizes = reference(**plain, dtype=torch.float64)
    of_codes = reference(**{n: ones_of(v) if "scale" in n else v for n, v in plain.items()}, dtype=torch.float64)
    made = call(**arguments, backend=kernel, out_dtype=torch.float32).double()
    certain = (sizes < 2.0**128) | (want.abs() > 0.99 * sizes)
    assert bool(certain.float().mean() > 0.3)
    assert bool((want[certain] == 0).any())
    assert not made[certain].isnan().any()
    far = certain & (want.abs() >= 2.0**128)
    assert bool(far.any())
    assert torch.equal(made[far], want[far].sign() * torch.inf)
    near = certain & (want.abs() < 2.0**127)
    allowed = 2.0**-9 * sizes + 2.0**-130 * of_codes + K / 128 * 2.0**-114
    wrong = near & ((made - want).abs() > allowed)
    assert not wrong.any(), [(made[wrong][:3], want[wrong][:3], allowed[wrong][:3])]


@pytest.mark.parametrize("kernel", ["torch.dequantized", "triton.fp8_gemm", "cpp.fp8_gemm"])
@pytest.mark.parametrize("rows", [3, M])  # C++ has a kernel for up to six
@pytest.mark.parametrize("scales", ["float32", "e8m0", "rows"])
def test_fp8_gemm(scales: str, rows: int, kernel: str) -> None:
    if kernel == "cpp.fp8_gemm" and DEVICE != "cpu":
        pytest.skip("cpp.fp8_gemm runs on a CPU: six cases")
    shapes = ((rows, 1), (N, 1)) if scales == "rows" else ((rows, 2), (2, 2))
    of_a, of_b = (scale(shape, seed, scales == "e8m0") for seed, shape in enumerate(shapes))
    check("fp8_gemm", {"a": codes(M, 1)[:rows], "b": codes(N, 2), "a_scale": of_a, "b_scale": of_b}, kernel)


@pytest.mark.parametrize("kernel", ["torch.per_group", "triton.grouped"])
@pytest.mark.parametrize("scales", ["float32", "e8m0", "rows"])
def test_grouped_gemm(scales: str, kernel: str) -> None:
    shapes = ((M, 1), (2, N)) if scales == "rows" else ((M, 2), (2, 2, 2))
    of_a, of_b = (scale(shape, seed, scales == "e8m0") for seed, shape in enumerate(shapes))
    b = torch.stack([codes(N, 2), codes(N, 3)])
    offsets = torch.tensor([5, M], dtype=torch.int32)
    check("grouped_gemm", {"a": codes(M, 1), "b": b, "a_scale": of_a, "b_scale": of_b, "offsets": offsets}, kernel)


@pytest.mark.parametrize("kernel", ["torch.dequantized", "triton.bmm_fp8", "cpp.bmm_fp8"])
def test_bmm_fp8(kernel: str) -> None:
    """One scale for each matrix."""
    if kernel == "cpp.bmm_fp8" and DEVICE != "cpu":
        pytest.skip("cpp.bmm_fp8 runs on a CPU: one case")
    of_a, of_b = (torch.tensor(powers).exp2() for powers in ([127.0, 127.0, -100.0], [127.0, -127.0, 120.0]))
    a, b = (torch.stack([codes(size, seed) for seed in range(3)]) for size in (M, 16))
    check("bmm_fp8", {"a": a, "b": b, "a_scale": of_a, "b_scale": of_b}, kernel)


@pytest.mark.parametrize("kernel", ["torch.dequantized", "triton.fp4_gemm"])
@pytest.mark.parametrize("powers", [(127.0, -100.0), (-100.0, 127.0), (120.0, 2.0)])
def test_global_scales_of_fp4_gemm(powers: tuple[float, float], kernel: str) -> None:
    """Of a and of b, where sums times one of the two are beyond float32."""
    made = torch.randint(0, 256, (2, 16, 32), generator=torch.Generator().manual_seed(4)).to(torch.uint8)
    made[0, ::2] = 0
    arguments = {"a": made[0], "b": made[1], "a_scale": torch.ones(16, 4), "b_scale": torch.ones(16, 4)}
    arguments |= {name: arguments[name].to(torch.float8_e4m3fn) for name in ("a_scale", "b_scale")}
    globals_ = torch.tensor(powers).exp2()
    arguments |= {"a_global_scale": globals_[:1], "b_global_scale": globals_[1:]}
    arguments = {name: value.to(DEVICE) for name, value in arguments.items()}
    want = kernelhub.fp4_gemm.reference(**arguments, dtype=torch.float64)
    result = kernelhub.fp4_gemm(**arguments, out_dtype=torch.float32, backend=kernel)
    assert torch.equal(result, want.float())  # powers of two of sums of few bits: exact


def beside_zero(kernel: str, rows: int, shape: tuple[int, ...], other: tuple[int, ...], at: int) -> dict[str, Tensor]:
    """Codes up to 448, whose sums times 2^127 are beyond float32, and on one side scales of 0 and next to it."""
    a, b = (to_e4m3(codes(size, seed).float().sign() * 448.0) for seed, size in ((1, M), (2, N)))
    # Kernels that multiply operands by such scales first lose what is below 2^-126 where a machine's products do.
    least = [2.0**-149, -(2.0**-130)] if kernel.startswith("cpp") else [2.0**-127, -(2.0**-126)]
    tiny = torch.tensor([0.0, -0.0, *least, 2.0**-126])
    of_a, of_b = (torch.full(one, 2.0**127) for one in (shape, other))
    (of_a, of_b)[at].flatten()[:] = tiny.repeat(N)[: (of_a, of_b)[at].numel()]
    return {"a": a[:rows], "b": b, "a_scale": of_a, "b_scale": of_b}


@pytest.mark.parametrize("kernel", ["torch.dequantized", "triton.fp8_gemm", "cpp.fp8_gemm"])
@pytest.mark.parametrize("rows", [1, 3, M])
@pytest.mark.parametrize("scales", ["blocks", "rows", "tensor"])
def test_what_is_times_zero_is_zero(scales: str, rows: int, kernel: str) -> None:
    if kernel == "cpp.fp8_gemm" and DEVICE != "cpu":
        pytest.skip("cpp.fp8_gemm runs on a CPU: nine cases")
    shapes = {"blocks": ((rows, 2), (2, 2)), "rows": ((rows, 1), (N, 1)), "tensor": ((1,), (1,))}[scales]
    for at in range(2):
        arguments = {name: value.to(DEVICE) for name, value in beside_zero(kernel, rows, *shapes, at).items()}
        want = kernelhub.fp8_gemm.reference(**arguments, dtype=torch.float64)
        made = kernelhub.fp8_gemm(**arguments, backend=kernel, out_dtype=torch.float32)
        torch.testing.assert_close(made.double(), want, rtol=2.0**-9, atol=2.0**-120)
        assert bool((made == 0).any())


@pytest.mark.parametrize("kernel", ["torch.dequantized", "triton.bmm_fp8", "cpp.bmm_fp8"])
def test_what_is_times_zero_is_zero_in_a_batch(kernel: str) -> None:
    if kernel == "cpp.bmm_fp8" and DEVICE != "cpu":
        pytest.skip("cpp.bmm_fp8 runs on a CPU: one case")
    for at, rows in ((0, 1), (1, 1), (0, M), (1, M)):
        one = beside_zero(kernel, rows, (5,), (5,), at)
        stacked = {name: one[name].unsqueeze(0).repeat(5, 1, 1) for name in "ab"}
        arguments = {name: value.to(DEVICE) for name, value in (one | stacked).items()}
        want = kernelhub.bmm_fp8.reference(**arguments, dtype=torch.float64)
        made = kernelhub.bmm_fp8(**arguments, backend=kernel, out_dtype=torch.float32)
        torch.testing.assert_close(made.double(), want, rtol=2.0**-9, atol=2.0**-120)
        assert not bool(made[:2].any())
