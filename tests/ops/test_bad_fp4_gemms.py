"""Operands that cannot be multiplied: one clear error that names the parameter, on a first call and on a warm one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import ConfigurationError, InvalidArgument
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs

z = torch.zeros
U8, E4M3, E8M0 = torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu


def raw(*shape: int, dtype: torch.dtype = U8) -> torch.Tensor:
    return z(shape, dtype=U8).view(dtype)


def call(a_format: str = "bfloat16", b_format: str = "nvfp4", **changes: Any) -> dict[str, Any]:
    return {**fp4_gemm_inputs(tokens=3, n=8, k=64, a_format=a_format, b_format=b_format), **changes}


BAD = [
    ("a", call(a=3), "is int"),
    ("a", call(a=z(3, 64)), "float32"),
    ("a", call(a=z(()).bfloat16()), "no dimension"),
    ("a", call(a=z(3, 48).bfloat16()), "b has 64"),
    ("a", call(a=z(3, 64, device="meta").bfloat16()), "meta"),
    ("a", call(a=z(3, 64, dtype=torch.bfloat16, requires_grad=True)), "requires grad"),
    ("a", call("mxfp4", a=raw(3, 24), a_scale=raw(3, 1)), "nearest is 32"),
    ("a", call("mxfp8", a=raw(3, 48, dtype=E4M3), b=raw(8, 24), b_scale=raw(8, 3, dtype=E4M3)), "nearest is 64"),
    ("a_scale", call(a_scale=z(1)), "given for bfloat16"),
    ("a_scale", call("fp8", a_scale=None), "NoneType"),
    ("a_scale", call("fp8", a_scale=z(4, 1)), r"\[3, 1\]"),
    ("a_scale", call("fp8", a_scale=raw(3, 2, dtype=E4M3)), "float8_e4m3fn"),
    ("a_scale", call("mxfp8", a_scale=raw(3, 3, dtype=E8M0)), r"give \[3, 2\]"),
    ("a_scale", call("nvfp4", a_scale=raw(3, 2, dtype=E4M3)), r"give \[3, 4\]"),
    ("a_global_scale", call("nvfp4", a_global_scale=None), "is missing"),
    ("a_global_scale", call("mxfp4", a_global_scale=z(1)), "only nvfp4"),
    ("a_global_scale", call(a_global_scale=z(1)), "only nvfp4"),
    ("b", call(b=[1]), "is list"),
    ("b", call(b=z(8, 32)), "float32"),
    ("b", call(b=raw(2, 8, 32)), r"\[2, 8, 32\]"),
    ("b", call(b=raw(0, 32)), "at least one element"),
    ("b", call(b=raw(8, 30), b_scale=raw(8, 4, dtype=E4M3)), "nearest is 32"),
    ("b", call(b_format="mxfp4", b=raw(8, 24), b_scale=raw(8, 1)), "nearest is 32"),
    ("b_scale", call(b_scale=None), "NoneType"),
    ("b_scale", call(b_scale=z(8, 4)), "float32"),
    ("b_scale", call(b_scale=raw(8, 2, dtype=E4M3)), r"give \[8, 4\], row by row, not swizzled"),
    ("b_scale", call(b_scale=raw(128, 4, dtype=E4M3)), "not swizzled"),
    ("b_global_scale", call(b_global_scale=None), "is missing"),
    ("b_global_scale", call(b_global_scale=1.0), "is float"),
    ("b_global_scale", call(b_global_scale=z(2)), "one element"),
    ("b_global_scale", call(b_format="mxfp4", b_global_scale=z(1)), "only nvfp4"),
    ("bias", call(bias=z(8).half()), "float16"),
    ("bias", call(bias=z(7)), r"give \[8\]"),
    ("out_dtype", call(out_dtype=torch.float64), "float64"),
    ("out_dtype", call(out_dtype="bfloat16"), "bfloat16"),
    ("out", call(out=z(3, 8)), "float32"),
    ("out", call(out=z(3, 9).bfloat16()), r"\[3, 8\]"),
    ("out", call(a=z(2, 3, 64).bfloat16(), out=z(3, 2, 8).bfloat16().transpose(0, 1)), "evenly spaced"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("parameter", "arguments", "words"), BAD)
def test_the_parameter_is_named(parameter: str, arguments: dict[str, Any], words: str, warm: bool) -> None:
    if warm:
        for a_format in ("bfloat16", "fp8", "mxfp8", "nvfp4", "mxfp4"):
            kernelhub.fp4_gemm(**call(a_format))
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.fp4_gemm(**arguments)
    assert caught.value.parameter == parameter
    assert sum(row.calls for row in kernelhub.report().rows) == 5 * warm


def test_a_k_that_is_no_multiple_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="the nearest is 96"):
        kernelhub.explain("fp4_gemm", k=80, b_format="mxfp4")
    assert kernelhub.explain("fp4_gemm", k=80, device="CPU").selected


def test_a_packed_weight_stands_alone() -> None:
    arguments = call()
    weight = {name: arguments[name] for name in ("b", "b_scale", "b_global_scale")}
    packed = kernelhub.fp4_gemm.prepare(**arguments).pack(**weight)
    with pytest.raises(InvalidArgument, match="the packed weight holds it") as caught:
        kernelhub.fp4_gemm(arguments["a"], packed, b_scale=arguments["b_scale"])
    assert caught.value.parameter == "b_scale"
    with pytest.raises(InvalidArgument, match="b has 64"):
        kernelhub.fp4_gemm(arguments["a"][:, :48], packed)
    with pytest.raises(InvalidArgument, match="nearest is 32"):
        kernelhub.fp4_gemm.prepare(**arguments).pack(raw(8, 30), arguments["b_scale"], arguments["b_global_scale"])
