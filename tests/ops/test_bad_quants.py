"""What cannot be quantised or read back: one clear error that names the parameter, on a first call and a warm one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import ConfigurationError, InvalidArgument

z = torch.zeros
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def codes(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(dtype)


GOOD: dict[str, dict[str, Any]] = {
    "quantize_fp8": {"x": z(4, 256)},
    "quantize_nvfp4": {"x": z(4, 256)},
    "quantize_mxfp4": {"x": z(4, 256)},
    "quantize_mxfp8": {"x": z(4, 256)},
    "dequantize_fp8": {"x": codes(4, 256), "scale": z(4, 1)},
    "dequantize_nvfp4": {"x": codes(4, 128, dtype=torch.uint8), "scale": codes(4, 16), "global_scale": z(1)},
    "dequantize_mxfp4": {"x": codes(4, 128, dtype=torch.uint8), "scale": codes(4, 8, dtype=E8M0)},
    "dequantize_mxfp8": {"x": codes(4, 256), "scale": codes(4, 8, dtype=E8M0)},
}
BAD = [
    *(
        (op, parameter, changes, words)
        for op in ("quantize_fp8", "quantize_nvfp4", "quantize_mxfp4", "quantize_mxfp8")
        for parameter, changes, words in (
            ("x", {"x": 3}, "is int"),
            ("x", {"x": z(4, 256).double()}, "float64"),
            ("x", {"x": z(())}, "at least one column"),
            ("x", {"x": z(4, 0)}, "at least one column"),
            ("x", {"x": z(4, 256, device="meta")}, "meta"),
            ("x", {"x": z(4, 256, requires_grad=True)}, "requires grad"),
            ("out", {"out": z(4, 256)}, "float32"),
            ("out", {"out": codes(3, 256)}, r"\[3, 256\]|float8"),
            ("out_scale", {"out_scale": z(4, 3).double()}, "float64"),
        )
    ),
    ("quantize_fp8", "granularity", {"granularity": "row"}, "give one of tensor, token"),
    ("quantize_fp8", "granularity", {"granularity": ["row"]}, "give one of tensor, token"),
    ("quantize_fp8", "group_size", {"granularity": "group", "group_size": 0}, "positive int"),
    ("quantize_fp8", "group_size", {"granularity": "group", "group_size": 2.0}, "positive int"),
    ("quantize_fp8", "scale_dtype", {"scale_dtype": torch.bfloat16}, "bfloat16"),
    ("quantize_fp8", "scale_layout", {"scale_layout": "M-major"}, "'row' or 'column'"),
    ("quantize_fp8", "x", {"x": z(256), "granularity": "block"}, r"give \[..., N, K\]"),
    ("quantize_fp8", "scale", {"scale": z(1), "granularity": "group"}, "only tensor and token"),
    ("quantize_fp8", "scale", {"scale": z(1), "granularity": "tensor", "ue8m0": True}, "to be rounded"),
    ("quantize_fp8", "scale", {"scale": z(2), "granularity": "tensor"}, "one element"),
    ("quantize_fp8", "scale", {"scale": z(5, 1)}, r"\[4, 1\]"),
    ("quantize_fp8", "scale", {"scale": z(4, 1).half()}, "float16"),
    ("quantize_fp8", "out_scale", {"scale": z(4, 1), "out_scale": z(4, 1)}, "beside a scale"),
    ("quantize_fp8", "out_scale", {"out_scale": z(4)}, r"give float32 \[4, 1\]"),
    ("quantize_fp8", "out", {"x": z(2, 4, 256), "out": codes(4, 2, 256).transpose(0, 1)}, "evenly spaced"),
    ("quantize_nvfp4", "x", {"x": z(4, 250)}, "pad to 256"),
    ("quantize_mxfp4", "x", {"x": z(4, 240)}, "pad to 256"),
    ("quantize_nvfp4", "global_scale", {"global_scale": 1.0}, "is float"),
    ("quantize_nvfp4", "global_scale", {"global_scale": z(2)}, "one element"),
    ("quantize_nvfp4", "out_global_scale", {"global_scale": z(1), "out_global_scale": z(1)}, "beside"),
    ("quantize_mxfp4", "scale_rounding", {"scale_rounding": "even"}, "'floor' or 'up'"),
    ("quantize_mxfp8", "scale_rounding", {"scale_rounding": ["up"]}, "'floor' or 'up'"),
    *(
        (op, parameter, changes, words)
        for op in ("dequantize_fp8", "dequantize_nvfp4", "dequantize_mxfp4", "dequantize_mxfp8")
        for parameter, changes, words in (
            ("x", {"x": None}, "NoneType"),
            ("x", {"x": z(4, 256)}, "float32"),
            ("scale", {"scale": z(4, 5)}, r"\[4, 5\]|float32"),
            ("scale", {"scale": 1.0}, "is float"),
            ("out_dtype", {"out_dtype": torch.float64}, "float64"),
            ("out_dtype", {"out_dtype": "bfloat16"}, "bfloat16"),
            ("out", {"out": z(4, 256)}, "float32"),
            ("out", {"out": z(4, 255).bfloat16()}, r"\[4, 256\]"),
        )
    ),
    ("dequantize_fp8", "scale", {"scale": z(4, 3)}, r"give one of \[1\], \[4, 1\], \[4, 2\], \[1, 2\]"),
    ("dequantize_fp8", "group_size", {"scale": z(4, 2), "group_size": 0}, "positive int"),
    ("dequantize_nvfp4", "x", {"x": codes(4, 127, dtype=torch.uint8)}, "nearest is 128"),
    ("dequantize_mxfp4", "x", {"x": codes(4, 120, dtype=torch.uint8)}, "nearest is 128"),
    ("dequantize_nvfp4", "global_scale", {"global_scale": None}, "NoneType"),
    ("dequantize_nvfp4", "scale", {"scale": codes(4, 8)}, r"\[4, 16\]"),
    ("dequantize_mxfp4", "scale", {"scale": codes(4, 16, dtype=E8M0)}, r"\[4, 8\]"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("op", "parameter", "changes", "words"), BAD)
def test_the_parameter_is_named(op: str, parameter: str, changes: dict[str, Any], words: str, warm: bool) -> None:
    function = getattr(kernelhub, op)
    if warm:
        function(**GOOD[op])
    with pytest.raises(InvalidArgument, match=words) as caught:
        function(**{**GOOD[op], **changes})
    assert caught.value.parameter == parameter
    assert sum(row.calls for row in kernelhub.report().rows) == int(warm)


def test_facets_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="for tensor and token, not for group"):
        kernelhub.explain("quantize_fp8", granularity="group", static=True)
    with pytest.raises(ConfigurationError, match="not rounded to a power of two"):
        kernelhub.explain("quantize_fp8", static=True, scale_dtype="float8_e8m0fnu")
