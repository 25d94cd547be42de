"""Operands that do not fit together: one clear error that names the parameter, on a first call and on a warm one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument, NoKernel
from kernelhub.ops.gemm.grouped.inputs import PAIRS, grouped_gemm_inputs

z = torch.zeros
I32 = torch.int32
E4M3 = torch.float8_e4m3fn
U8 = torch.uint8


def made(format: str = "float32", **changes: Any) -> dict[str, Any]:
    """Rows of 3 groups, [9, 256], and weights [3, 192, 256]."""
    return grouped_gemm_inputs(sizes=(4, 0, 5), spare=0, format=format) | changes


def masked(**changes: Any) -> dict[str, Any]:
    return grouped_gemm_inputs(sizes=(4, 0, 5), spare=0, format="float32", masked=True) | changes


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=I32)


BAD = [
    ("a", made(a=3), "is int"),
    ("a", made(a=z(9, 2, 256)), r"\[9, 2, 256\]"),
    ("a", masked(a=z(9, 256)), r"give \[G, M_max, K\] with group_sizes"),
    ("a", masked(a=z(4, 5, 256)), "has 4 groups"),
    ("a", made(a=z(9, 255)), "has 255 columns; b has 256"),
    ("a", made(a=z(9, 256).double(), b=z(3, 192, 256).double()), "dtype float64"),
    ("a", made(a=z(9, 256).half()), "has dtype float16; b has float32"),
    ("a", made(a=z(9, 256, requires_grad=True)), "requires grad"),
    ("a", made(a=z(9, 256, device="meta")), "on meta"),
    ("a", made("nvfp4", a=z(9, 256)), "fp4 weights take float16 or bfloat16 rows"),
    ("b", made(b=None), "is NoneType"),
    ("b", made(b=z(192, 256)), r"\[192, 256\]"),
    ("b", made(b=z(3, 0, 256)), "none of them 0"),
    ("b", made(b=z(3, 192, 256).int()), "dtype int32"),
    ("offsets", made(offsets=None), "are both missing"),
    ("offsets", made(group_sizes=lengths(4, 0, 5)), "are both given"),
    ("offsets", made(offsets=lengths(4, 4, 9).long()), "int64"),
    ("offsets", made(offsets=lengths(0, 4, 4, 9)), r"\[4\].*give int32 \[3\]"),
    ("offsets", made(offsets=lengths(4, 3, 9)), "is 3 at 1; it must be between 4 and 9"),
    ("offsets", made(offsets=lengths(4, 4, 10)), "is 10 at 2"),
    ("offsets", made(offsets=lengths(-1, 4, 9)), "is -1 at 0"),
    ("group_sizes", masked(group_sizes=lengths(4, 0, 6)), "is 6 at 2; it must be between 0 and 5"),
    ("group_sizes", masked(group_sizes=lengths(4, 0)), r"\[2\]"),
    ("a_scale", made(a_scale=z(1)), "is given"),
    ("a_scale", made("channel", a_scale=None), "is missing"),
    ("a_scale", made("channel", a_scale=z(8)), r"float32 \[8\]; token scales are float32 \[9, 1\]"),
    ("a_scale", made("channel", a_scale=z(9).half()), "float16"),
    ("a_scale", made("block", a_scale=z(9, 3)), r"group scales are float32 \[9, 2\]"),
    ("a_scale", made("block", a_scale=z(9)), r"group scales are float32 \[9, 2\]"),
    ("b_scale", made(b_scale=z(3)), "is given"),
    ("b_scale", made("channel", b_scale=None), "is missing"),
    ("b_scale", made("nvfp4", b_scale=None, b_global_scale=None), "is missing"),
    ("b_scale", made("tensor", b_scale=z(2)), r"tensor scales are float32 \[3\]"),
    ("b_scale", made("channel", b_scale=z(3, 191)), r"channel scales are float32 \[3, 192\]"),
    ("b_scale", made("block", b_scale=z(3, 1, 2)), r"block scales are float32 \[3, 2, 2\]"),
    ("b_scale", made("block", b_scale=z(3, 192, 2)), r"block scales are float32 \[3, 2, 2\]"),
    # As other libraries lay scales: what to give instead.
    ("a_scale", made("block", a_scale=z(2, 9)), r"is transposed \(MN-major\): give the view a_scale.mT, \[9, 2\]"),
    (
        "b_scale",
        made("block", b=z(3, 300, 256, dtype=U8).view(E4M3), b_scale=z(3, 2, 3)),
        r"give the view b_scale.mT, \[3, 3, 2\]",
    ),
    ("a_scale", made("block", a_scale=z(9, 1, dtype=torch.int32)), r"four exponents.*float8_e8m0fnu \[9, 2\]"),
    ("b_scale", made("block", b_scale=z(3, 192, 1, dtype=torch.int32)), r"four exponents"),
    ("b_scale", made("nvfp4", b_scale=z(3, 192, 8).to(E4M3)), r"nvfp4 scales are float8_e4m3fn \[3, 192, 16\]"),
    ("b_scale", made("mxfp4", b_scale=z(3, 192, 8)), "mxfp4 scales are float8_e8m0fnu or uint8"),
    ("a", made("nvfp4 x nvfp4", b_scale=z(3, 192, 8, dtype=U8), b_global_scale=None), "nvfp4 rows take nvfp4 weights"),
    ("a", made("mxfp8 x mxfp4", b_scale=z(3, 192, 16).to(E4M3)), "mxfp8 rows take mxfp8 or mxfp4 weights"),
    ("a", made("mxfp4 x mxfp4", a=z(9, 64, dtype=U8)), "has 128 columns; b has 256"),
    ("a", made("channel", a=z(9, 128, dtype=U8)), "float4_e2m1fn_x2; b has float8_e4m3fn"),
    ("a_scale", made("nvfp4 x nvfp4", a_scale=None), "is missing"),
    ("a_scale", made("nvfp4 x nvfp4", a_scale=z(9, 8).to(E4M3)), r"nvfp4 scales are float8_e4m3fn \[9, 16\]"),
    ("a_scale", made("mxfp8 x mxfp4", a_scale=z(9)), r"mxfp8 scales are float8_e8m0fnu or uint8 \[9, 8\]"),
    ("b_scale", made("mxfp8 x mxfp8", b_scale=z(3, 192, 7, dtype=U8)), r"uint8 \[3, 192, 8\]"),
    ("a_global_scale", made(a_global_scale=z(3)), "it belongs to NVFP4 rows"),
    ("a_global_scale", made("nvfp4", a_global_scale=z(3)), "it belongs to NVFP4 rows"),
    ("a_global_scale", made("nvfp4 x nvfp4", a_global_scale=z(9)), r"give float32 \[3\]"),
    ("b_global_scale", made(b_global_scale=z(3)), "it belongs to NVFP4"),
    ("b_global_scale", made("mxfp4", b_global_scale=z(3)), "it belongs to NVFP4"),
    ("b_global_scale", made("nvfp4", b_global_scale=z(2)), r"give float32 \[3\]"),
    ("bias", made(bias=z(192)), r"give float32, float16, bfloat16 \[3, 192\]"),
    ("bias", made(bias=z(3, 192).int()), "int32"),
    ("out_dtype", made(out_dtype=torch.int8), "torch.int8"),
    ("out", made(out=z(9, 191)), r"\[9, 191\]; give \[9, 192\]"),
    ("out", made(out=z(9, 192).int()), "int32"),
    ("out", made(out=z(9, 192), out_dtype=torch.float16), "give float16"),
    ("out", made(out=z(9, 192, device="meta")), "on meta"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("parameter", "arguments", "words"), BAD)
def test_the_parameter_is_named(parameter: str, arguments: dict[str, Any], words: str, warm: bool) -> None:
    if warm:
        for format in ("float32", "channel", "block", "tensor", "nvfp4", "mxfp4", *PAIRS):
            kernelhub.grouped_gemm(**made(format))
        kernelhub.grouped_gemm(**masked())
    counted = sum(row.calls for row in kernelhub.report().rows)
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.grouped_gemm(**arguments)
    assert caught.value.parameter == parameter
    assert sum(row.calls for row in kernelhub.report().rows) == counted


def test_what_no_kernel_can_do_is_refused_with_reasons() -> None:
    with pytest.raises(NoKernel, match=r"torch\.per_group .*not_requested"):
        kernelhub.grouped_gemm(**made(), backend="torch.sdpa")


@pytest.mark.parametrize(
    ("facets", "words"),
    [
        ({"a_dtype": "float16", "b_dtype": "bfloat16"}, "they must be equal except for fp4"),
        ({"a_dtype": "float32", "b_scale": "nvfp4"}, "fp4 weights take float16 or bfloat16"),
        ({"a_dtype": "float8_e4m3fn", "b_scale": "nvfp4"}, "goes with mxfp8 or mxfp4"),
        ({"a_scale": "nvfp4", "b_scale": "mxfp4"}, "a_scale is nvfp4 and b_scale mxfp4; it goes with nvfp4"),
        ({"a_scale": "token", "b_scale": "mxfp8"}, "it goes with mxfp8"),
        ({"a_scale": "mxfp8", "b_scale": "block_e8m0"}, "it goes with mxfp8 or mxfp4"),
        ({"a_scale": "mxfp4", "a_dtype": "float8_e4m3fn"}, "belong to float4_e2m1fn_x2"),
        ({"a_global_scale": True, "a_scale": "mxfp8"}, "a_global_scale belongs to nvfp4"),
        ({"a_scale": "group", "b_scale": "channel"}, "1 x 128 goes with 128 x 128"),
        ({"global_scale": True, "b_scale": "mxfp4"}, "global_scale belongs to nvfp4"),
        ({"a_dtype": "bfloat16", "b_dtype": "bfloat16", "a_scale": "token", "b_scale": "channel"}, "scales belong to"),
    ],
)
def test_facets_that_cannot_stand_together_are_refused(facets: dict[str, Any], words: str) -> None:
    with pytest.raises(kernelhub.errors.ConfigurationError, match=words):
        kernelhub.explain("grouped_gemm", device="H200", **facets)
