"""Products that cannot be made: one clear error that names the parameter, on a first call and on a warm one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument, NoKernel
from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.reference import fp8_gemm_reference
from kernelhub.ops.gemm.fp8.tolerance import compare

z = torch.zeros


def codes(*shape: int, **how: Any) -> torch.Tensor:
    return z(*shape, dtype=torch.uint8, **how).view(E4M3)


def call(**changes: Any) -> dict[str, Any]:
    return {"a": codes(4, 200), "b": codes(150, 200), "a_scale": z(4, 2), "b_scale": z(2, 2)} | changes


def weights(**changes: Any) -> dict[str, Any]:
    """Activations that are not quantised."""
    return call(a=z(4, 200).bfloat16(), a_scale=None) | changes


BAD = [
    ("a", call(a=3), "is int"),
    ("a", call(a=codes(4, 1, 200)), r"\[4, 1, 200\]"),
    ("a", call(a=z(4, 200)), "float32; give float8_e4m3fn, float8_e5m2, bfloat16, float16"),
    ("a", call(a=codes(4, 199)), "has 199 columns; b has 200"),
    ("a", call(a=codes(4, 200, device="meta")), "is on meta"),
    ("a_scale", call(a=z(4, 200, dtype=torch.float8_e5m2), a_scale=None), "is missing; a is float8_e5m2"),
    ("b", call(b=z(150, 200, dtype=torch.float8_e5m2)), "has dtype float8_e5m2; give float8_e4m3fn"),
    ("b", call(b=None), "NoneType"),
    ("b", call(b=codes(200)), r"\[200\]"),
    ("b", call(b=z(150, 200).bfloat16()), "bfloat16"),
    ("b", call(b=codes(0, 200), b_scale=z(0, 2)), "at least one"),
    ("a", call(b=codes(150, 200, device="meta"), a=codes(4, 200, device="meta")), "meta"),
    ("a_scale", call(a_scale=1.0), "is float"),
    ("a_scale", call(a_scale=z(4, 3)), r"float32 \[4, 3\] beside a b_scale of float32 \[2, 2\].*\[4, 2\] by \[2, 2\]"),
    ("a_scale", call(a_scale=z(5, 2)), r"a has 4 rows: give \[4, 2\]"),
    ("a_scale", call(a_scale=z(5), b_scale=z(150)), r"a has 4 rows: give \[4\]"),
    ("a_scale", call(a_scale=z(4, 2).half()), "float16"),
    ("a_scale", call(a_scale=z(())), "is float32 \\[\\] beside"),
    ("a_scale", call(a_scale=z(4, 7)), r"\[4, 7\]"),
    ("a_scale", call(a_scale=z(4, 2, device="meta")), "is on meta"),
    ("a_scale", call(a_scale=z(4, 2, requires_grad=True)), "requires grad"),
    ("a_scale", call(a_scale=None), "is missing; a is float8_e4m3fn"),
    ("a_scale", call(a=z(4, 200).bfloat16()), "is given; a is bfloat16: leave it out"),
    ("b_scale", weights(b_scale=z(149)), r"float32 \[149\]; for b \[150, 200\] beside bfloat16 give"),
    ("b_scale", weights(b_scale=z(150, 7).to(E8M0)), r"float8_e8m0fnu \[150, 7\]"),
    ("b_scale", weights(b_scale=None), "is NoneType"),
    ("a", weights(a=z(4, 199).half()), "has 199 columns; b has 200"),
    ("bias", weights(bias=z(150)), "float32"),
    ("out", weights(out=z(4, 150)), "float32"),
    ("b_scale", call(b_scale=[1]), "is list"),
    ("b_scale", call(b_scale=z(2, 3)), r"float32 \[2, 3\].*\[2, 2\]"),
    ("b_scale", call(b_scale=z(1, 2)), r"\[1, 2\]"),
    ("b_scale", call(b_scale=z(150, 2).double()), "float64"),
    ("b_scale", call(b_scale=z(150, 3)), r"\[150, 3\]"),
    # As other libraries lay scales: what to give instead.
    ("a_scale", call(a_scale=z(2, 4)), r"is transposed \(MN-major\): give the view a_scale.t\(\), \[4, 2\]"),
    ("b_scale", call(b_scale=z(2, 150)), r"is transposed \(MN-major\): give the view b_scale.t\(\), \[150, 2\]"),
    ("b_scale", call(b=codes(300, 200), b_scale=z(2, 3)), r"give the view b_scale.t\(\), \[3, 2\]"),
    ("b_scale", weights(b=codes(300, 200), b_scale=z(2, 3)), r"give the view b_scale.t\(\), \[3, 2\]"),
    ("a_scale", call(a_scale=z(4, 1, dtype=torch.int32)), r"four exponents.*float8_e8m0fnu \[4, 2\]"),
    ("b_scale", call(b_scale=z(150, 1, dtype=torch.int32)), r"four exponents.*float8_e8m0fnu \[150, 2\]"),
    ("b_scale", call(a_scale=z(4, 7).to(E8M0), b_scale=z(150, 7)), r"float8_e8m0fnu \[4, 7\] by \[150, 7\]"),
    ("bias", call(bias=z(149).bfloat16()), r"bfloat16 \[149\]; give bfloat16 \[150\]"),
    ("bias", call(bias=z(150)), "float32"),
    ("bias", call(bias=0), "is int"),
    ("out_dtype", call(out_dtype=torch.float64), "float64"),
    ("out_dtype", call(out_dtype="bfloat16"), "bfloat16"),
    ("out", call(out=z(4, 151).bfloat16()), r"\[4, 151\]"),
    ("out", call(out=z(4, 150)), "float32"),
    ("out", call(out=z(4, 150, device="meta").bfloat16()), "is on meta"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("parameter", "arguments", "words"), BAD)
def test_the_parameter_is_named(parameter: str, arguments: dict[str, Any], words: str, warm: bool) -> None:
    if warm:
        kernelhub.fp8_gemm(**call())
        kernelhub.fp8_gemm(**call(a_scale=z(4), b_scale=z(150)))
        kernelhub.fp8_gemm(**call(bias=z(150).bfloat16()))
        kernelhub.fp8_gemm(**weights())
        kernelhub.fp8_gemm(**weights(b_scale=z(150)))
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.fp8_gemm(**arguments)
    assert caught.value.parameter == parameter
    assert sum(row.calls for row in kernelhub.report().rows) == 5 * warm


def test_a_plan_for_e4m3_refuses_e5m2_and_the_other_way_round() -> None:
    e5m2 = torch.float8_e5m2
    for dtype, other in ((E4M3, e5m2), (e5m2, E4M3)):
        plan = kernelhub.fp8_gemm.prepare(**call(a=z(4, 200, dtype=dtype)))
        plan.run(**call(a=z(4, 200, dtype=dtype)))
        with pytest.raises(InvalidArgument, match=f"{str(other)[6:]}; the plan is for {str(dtype)[6:]}"):
            plan.run(**call(a=z(4, 200, dtype=other)))


def test_a_kernel_that_cannot_says_why() -> None:
    with pytest.raises(NoKernel, match="NVIDIA"):
        kernelhub.fp8_gemm(**call(), backend="torch.scaled_mm")


def test_pads_that_an_operator_needs_are_reported() -> None:
    selection = kernelhub.explain("fp8_gemm", device="H200", scaling="tensor", n=100, k=24)
    decision = next(item for item in selection.decisions if item.kernel == "torch.scaled_mm")
    assert {"pad n to 112", "pad k to 32"} <= {item.remedy for item in decision.rejections}


@pytest.mark.parametrize(
    "facets", [{"scaling": "mx", "a_scale_dtype": "float32"}, {"scaling": "row", "b_scale_dtype": "float8_e8m0fnu"}]
)
def test_facets_that_cannot_stand_together_are_refused(facets) -> None:
    with pytest.raises(Exception, match="scales of"):
        kernelhub.explain("fp8_gemm", device="H200", **facets)


@pytest.mark.parametrize("scaling", ["tensor", "row", "block", "row_block", "mx"])
def test_the_reference_itself_is_right(scaling: str) -> None:
    """Held against sums written out element by element, in float64."""
    arguments = fp8_gemm_inputs(tokens=3, n=130, k=200, scaling=scaling, bias=True)
    a, b, a_scale, b_scale = (arguments[name] for name in ("a", "b", "a_scale", "b_scale"))
    width = {"tensor": 200, "row": 200, "block": 128, "row_block": 128, "mx": 32}[scaling]
    tall = {"tensor": 200, "row": 1, "block": 128, "row_block": 1, "mx": 1}[scaling]
    want = torch.zeros(3, 130, dtype=torch.float64)
    for i in range(3):
        for j in (0, 1, 127, 128, 129):
            for k in range(200):
                left = float(
                    a_scale.float().reshape(-1, a_scale.shape[-1] if a_scale.ndim else 1)[
                        i if scaling != "tensor" else 0, k // width
                    ]
                )
                right = float(
                    b_scale.float().reshape(-1, b_scale.shape[-1] if b_scale.ndim else 1)[j // tall, k // width]
                )
                want[i, j] += float(a[i, k].float()) * left * float(b[j, k].float()) * right
            want[i, j] += float(arguments["bias"][j])
    got = fp8_gemm_reference(**arguments, dtype=torch.float64)
    for j in (0, 1, 127, 128, 129):
        torch.testing.assert_close(got[:, j], want[:, j], rtol=1e-12, atol=1e-12)
    assert compare(fp8_gemm_reference(**arguments), fp8_gemm_reference, arguments, matrix_instructions=False).ok
