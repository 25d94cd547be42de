"""Batches that cannot be multiplied: one clear error that names the parameter, on a first call and on a warm one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.formats import E4M3, E5M2
from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
from kernelhub.ops.gemm.fp8.batched.reference import bmm_fp8_reference

z = torch.zeros


def codes(*shape: int, **how: Any) -> torch.Tensor:
    return z(*shape, dtype=torch.uint8, **how).view(E4M3)


def call(**changes: Any) -> dict[str, Any]:
    return {"a": codes(3, 4, 8), "b": codes(3, 6, 8), "a_scale": z(()), "b_scale": z(3)} | changes


BAD = [
    ("a", call(a=3), "is int"),
    ("a", call(a=codes(4, 8)), r"\[4, 8\]"),
    ("a", call(a=z(3, 4, 8)), "float32"),
    ("a", call(a=codes(3, 4, 7)), r"give \[3, M, 8\]"),
    ("a", call(b=codes(3, 8, 6)), "transpose one of"),
    ("a", call(a=codes(2, 4, 8)), r"give \[3, M, 8\]"),
    ("a", call(a=codes(3, 4, 8, device="meta")), "meta"),
    ("b", call(b=None), "NoneType"),
    ("b", call(b=codes(6, 8)), r"\[6, 8\]"),
    ("b", call(b=z(3, 6, 8).half()), "float16"),
    ("b", call(a=codes(3, 4, 8).view(E5M2), b=codes(3, 6, 8).view(E5M2)), "one of the two may be float8_e5m2"),
    ("b", call(b=codes(3, 0, 8)), "at least one"),
    ("b", call(b=codes(3, 6, 8, device="meta")), "is on meta"),
    ("a_scale", call(a_scale=1.0), "is float"),
    ("a_scale", call(a_scale=z(4)), r"float32 \[4\].*\[3\]"),
    ("a_scale", call(a_scale=z(3, 2)), r"\[3, 1, 1\]"),
    ("a_scale", call(a_scale=z(()).half()), "float16"),
    ("b_scale", call(b_scale=z(2)), r"float32 \[2\]"),
    ("b_scale", call(b_scale=z(3).double()), "float64"),
    ("b_scale", call(b_scale=z(3, requires_grad=True)), "requires grad"),
    ("out_dtype", call(out_dtype=torch.int8), "int8"),
    ("out", call(out=z(3, 4, 7).bfloat16()), r"\[3, 4, 7\]"),
    ("out", call(out=z(3, 4, 6)), "float32"),
    ("out", call(out=0), "is int"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("parameter", "arguments", "words"), BAD)
def test_the_parameter_is_named(parameter: str, arguments: dict[str, Any], words: str, warm: bool) -> None:
    if warm:
        kernelhub.bmm_fp8(**call())
        kernelhub.bmm_fp8(**call(a_scale=z(3)))
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.bmm_fp8(**arguments)
    assert caught.value.parameter == parameter
    assert sum(row.calls for row in kernelhub.report().rows) == 2 * warm


def test_the_reference_itself_is_right() -> None:
    arguments = bmm_fp8_inputs(batch=3, tokens=2, n=5, k=7, a_scaling="batch", b_scaling="tensor")
    a, b, a_scale, b_scale = (arguments[name].float().double() for name in ("a", "b", "a_scale", "b_scale"))
    want = torch.zeros(3, 2, 5, dtype=torch.float64)
    for i, j, l in torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(5)).tolist():  # noqa: E741
        want[i, j, l] = sum(float(a[i, j, k] * a_scale[i] * b[i, l, k] * b_scale) for k in range(7))
    torch.testing.assert_close(bmm_fp8_reference(**arguments, dtype=torch.float64), want, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(bmm_fp8_reference(**arguments).double(), want, rtol=1e-5, atol=1e-6)
