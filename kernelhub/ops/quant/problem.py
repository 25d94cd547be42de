"""What selection may look at for quantisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import facet, feature
from kernelhub.probes.device import DeviceFacts

FLOATS = ("float32", "float16", "bfloat16")
TENSOR, TOKEN, GROUP, BLOCK = "tensor", "token", "group", "block"
GRANULARITIES = (TENSOR, TOKEN, GROUP, BLOCK)
BLOCK_SIZE = 128
MX_GROUP, NVFP4_GROUP = 32, 16
FP8_SCALES = ("float32", "float8_e8m0fnu")
GROUPS, OTHERS = "groups", "others"  # regimes of quantize_fp8


@dataclass(frozen=True)
class QuantizeProblem:
    """The facets that all quantisers have."""

    device: DeviceFacts = facet("where the tensors are")
    dtype: str = facet("dtype of what is quantised", values=FLOATS, default="bfloat16")


@dataclass(frozen=True)
class QuantizeFp8Problem(QuantizeProblem):
    """One configuration of `quantize_fp8`."""

    granularity: str = facet(
        "granularity of the scales: tensor, token, group, block", values=GRANULARITIES, default=TOKEN
    )
    group_size: int = facet("elements of a row that share a scale, for group", default=128)
    scale_dtype: str = facet("dtype of the scales", values=FP8_SCALES, default="float32")
    ue8m0: bool = feature("scales are powers of two, rounded up", False)
    static: bool = feature("the scale is given", False)
    column: bool = feature("scales are column-major", False)


@dataclass(frozen=True)
class QuantizeNvfp4Problem(QuantizeProblem):
    """One configuration of `quantize_nvfp4`."""

    static: bool = feature("the global scale is given", False)


@dataclass(frozen=True)
class QuantizeMxProblem(QuantizeProblem):
    """One configuration of `quantize_mxfp4` or `quantize_mxfp8`."""

    round_up: bool = feature("scales are rounded up, so that nothing saturates", False)


@dataclass(frozen=True)
class DequantizeProblem:
    """One configuration of `dequantize_nvfp4`, `dequantize_mxfp4` or `dequantize_mxfp8`."""

    device: DeviceFacts = facet("where the tensors are")
    out_dtype: str = facet("dtype of the result", values=FLOATS, default="bfloat16")


@dataclass(frozen=True)
class DequantizeFp8Problem(DequantizeProblem):
    """One configuration of `dequantize_fp8`."""

    granularity: str = facet(
        "granularity of the scales: tensor, token, group, block", values=GRANULARITIES, default=TOKEN
    )
    group_size: int = facet("elements of a row that share a scale, for group", default=128)
    scale_dtype: str = facet("dtype of the scales", values=FP8_SCALES, default="float32")


def fp8_complete(facets: dict[str, Any]) -> dict[str, Any]:
    """Scales in float8_e8m0fnu are powers of two."""
    return {**facets, "ue8m0": True} if facets.get("scale_dtype") == "float8_e8m0fnu" else facets


def fp8_contradiction(problem: QuantizeFp8Problem) -> str | None:
    """Features that exclude each other."""
    if problem.static and problem.granularity not in (TENSOR, TOKEN):
        return f"a scale can be given for tensor and token, not for {problem.granularity}"
    if problem.static and problem.ue8m0:
        return "a scale that is given is not rounded to a power of two"
    return None


def fp8_regime(problem: QuantizeFp8Problem) -> str:
    """Order lines distinguish scales of groups, which a part of a warp finds, from those of larger areas."""
    return GROUPS if problem.granularity == GROUP else OTHERS


QUANTIZE_FP8 = OpRecord(
    name="quantize_fp8",
    summary="floats into float8 with scales per tensor, token, group or block",
    problem=QuantizeFp8Problem,
    complete=fp8_complete,
    contradiction=fp8_contradiction,
    regimes=(GROUPS, OTHERS),
    regime=fp8_regime,
)
DEQUANTIZE_FP8 = OpRecord(
    name="dequantize_fp8",
    summary="float8 with scales per tensor, token, group or block back into floats",
    problem=DequantizeFp8Problem,
)
QUANTIZE_MXFP4 = OpRecord(
    name="quantize_mxfp4",
    summary="floats into float4 with a power of two for 32 elements",
    problem=QuantizeMxProblem,
)
DEQUANTIZE_MXFP4 = OpRecord(
    name="dequantize_mxfp4",
    summary="float4 with a power of two for 32 elements back into floats",
    problem=DequantizeProblem,
)
QUANTIZE_MXFP8 = OpRecord(
    name="quantize_mxfp8",
    summary="floats into float8 with a power of two for 32 elements",
    problem=QuantizeMxProblem,
)
DEQUANTIZE_MXFP8 = OpRecord(
    name="dequantize_mxfp8",
    summary="float8 with a power of two for 32 elements back into floats",
    problem=DequantizeProblem,
)
QUANTIZE_NVFP4 = OpRecord(
    name="quantize_nvfp4",
    summary="floats into float4 with a float8 scale for 16 elements and one for the tensor",
    problem=QuantizeNvfp4Problem,
)
DEQUANTIZE_NVFP4 = OpRecord(
    name="dequantize_nvfp4",
    summary="float4 with a float8 scale for 16 elements and one for the tensor back into floats",
    problem=DequantizeProblem,
)
