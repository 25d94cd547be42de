"""Calls of `rms_norm_quant` and `silu_and_mul_quant` that cannot be right: an error that names the parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.formats import E4M3, E8M0

z, ones = torch.zeros, torch.ones
NORM, SILU = "rms_norm_quant", "silu_and_mul_quant"
X, GATES = torch.randn(3, 32), torch.randn(3, 64)


def norm(**changes: Any) -> dict[str, Any]:
    return {"x": X, "weight": ones(32)} | changes


def silu(**changes: Any) -> dict[str, Any]:
    return {"x": GATES} | changes


BAD = [
    (NORM, "x", norm(x=[1]), "is list"),
    (NORM, "x", norm(x=X.double()), "float64"),
    (NORM, "x", norm(x=z(3, 0)), "at least one column"),
    (NORM, "x", norm(x=z(3, 32, device="meta")), "meta"),
    (NORM, "x", norm(x=z(3, 32, requires_grad=True)), "requires grad"),
    (NORM, "weight", norm(weight=ones(31)), r"give \[32\]"),
    (NORM, "weight", norm(weight=ones(32).half()), "float16"),
    (NORM, "weight", norm(weight=None), "NoneType"),
    (NORM, "eps", norm(eps=-1.0), "is -1.0"),
    (NORM, "eps", norm(eps="1"), "'1'"),
    (NORM, "residual", norm(residual=z(3, 31)), r"\[3, 31\]"),
    (NORM, "residual", norm(residual=z(3, 32).half()), "float16"),
    (NORM, "unit_offset", norm(unit_offset=2), "is 2"),
    (NORM, "format", norm(format="fp8"), "fp8_token"),
    (NORM, "format", norm(format="mxfp4"), "quantize_mxfp4"),
    (NORM, "scale", norm(format="fp8_tensor"), "is missing"),
    (NORM, "scale", norm(format="fp8_tensor", scale=z(2)), "one element"),
    (NORM, "scale", norm(scale=ones(1)), "belongs to fp8_tensor"),
    (NORM, "global_scale", norm(format="nvfp4"), "is missing"),
    (NORM, "global_scale", norm(format="fp8_group", global_scale=ones(1)), "belongs to nvfp4"),
    (NORM, "x", norm(x=z(3, 24), weight=ones(24), format="nvfp4", global_scale=ones(1)), "16 wide"),
    (NORM, "ue8m0", norm(format="mxfp8", ue8m0=True), "leave it alone"),
    (NORM, "scale_dtype", norm(scale_dtype=E8M0), "leave it alone"),
    (NORM, "scale_layout", norm(format="fp8_group", scale_layout="rows"), "'rows'"),
    (NORM, "out", norm(out=z(3, 31)), r"\[3, 31\]"),
    (NORM, "out", norm(out=X), "overlaps x"),
    (NORM, "out_scale", norm(out_scale=z(3, 1)), "leave it out"),
    (NORM, "out_scale", norm(format="fp8_token", out_scale=z(3, 2)), r"\[3, 2\]"),
    (NORM, "out_scale", norm(format="fp8_tensor", scale=ones(1), out_scale=z(1)), "is the result"),
    (NORM, "out_residual", norm(out_residual=z(3, 32)), "without residual"),
    (NORM, "out_residual", norm(residual=z(4, 32)[:3], out_residual=z(1, 32).expand(3, 32)), "overlaps itself"),
    (SILU, "x", silu(x=z(3, 63)), "the gate, followed by up"),
    (SILU, "x", silu(x=None), "NoneType"),
    (SILU, "format", silu(format="int8"), "'int8'"),
    (SILU, "out", silu(format="fp8_group", out=z(3, 64).to(E4M3)), r"\[3, 64\]"),
    (SILU, "scale", silu(format="fp8_tensor", scale=ones(1).double()), "float64"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("op", "parameter", "arguments", "words"), BAD)
def test_the_parameter_is_named(op: str, parameter: str, arguments: dict[str, Any], words: str, warm: bool) -> None:
    function = getattr(kernelhub, op)
    if warm:
        for form in ({}, {"format": "fp8_tensor", "scale": ones(1)}, {"format": "fp8_token"}, {"format": "fp8_group"}):
            function(**(norm() if op == NORM else silu()) | form)
    with pytest.raises(InvalidArgument, match=words) as caught:
        function(**arguments)
    assert caught.value.parameter == parameter


def test_a_residual_is_updated_in_place_and_rows_may_be_any_view() -> None:
    x, residual = torch.randn(4, 6, 32)[:, ::2], torch.randn(4, 3, 32)
    want = kernelhub.rms_norm_quant.reference(x, ones(32), residual=residual, format="fp8_token")
    for place in ("residual", "x"):
        given = {"x": x.clone(), "residual": residual.clone()}
        got = kernelhub.rms_norm_quant(**given, weight=ones(32), format="fp8_token", out_residual=given[place])
        assert got[2] is given[place]
        assert torch.equal(got[2], want[2])
        assert got[0].shape == (4, 3, 32)
        assert got[1].shape == (4, 3, 1)


def test_products_take_codes_and_scales_as_they_are() -> None:
    weight, weight_scale = kernelhub.quantize_fp8(torch.randn(64, 256) / 16, "block")
    x, ones_ = torch.randn(5, 256), ones(256)
    codes, scale = kernelhub.rms_norm_quant(x, ones_, format="fp8_group", scale_layout="column")
    got = kernelhub.fp8_gemm(codes, weight, scale, weight_scale, out_dtype=torch.float32)
    want = (
        kernelhub.rms_norm_quant(x, ones_) @ kernelhub.dequantize_fp8(weight, weight_scale, out_dtype=torch.float32).T
    )
    assert (got - want).abs().max() < 0.1 * want.abs().max()


def test_a_plan_refuses_other_rows() -> None:
    plan = kernelhub.rms_norm_quant.prepare(X, ones(32), format="fp8_group")
    assert plan.run(X, ones(32))[1].shape == (3, 1)
    for other in ({"x": z(3, 31), "weight": ones(31)}, {"residual": X.clone()}):
        with pytest.raises(InvalidArgument, match="the plan is for"):
            plan.run(**norm() | other)
