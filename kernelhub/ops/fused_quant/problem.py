"""Facets and constraints of `rms_norm_quant` and `silu_and_mul_quant`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import facet, feature
from kernelhub.ops.quant.problem import FLOATS, FP8_SCALES
from kernelhub.probes.device import DeviceFacts

NONE, FP8_TENSOR, FP8_TOKEN, FP8_GROUP, MXFP8, NVFP4 = "none", "fp8_tensor", "fp8_token", "fp8_group", "mxfp8", "nvfp4"
SCALES, OTHERS = "scales", "others"  # regimes
FORMATS = (NONE, FP8_TENSOR, FP8_TOKEN, FP8_GROUP, MXFP8, NVFP4)
SCALED = (FP8_TOKEN, FP8_GROUP)  # whose scales have options


@dataclass(frozen=True)
class FusedProblem:
    """The facets that both ops have."""

    device: DeviceFacts = facet("where the tensors are")
    dtype: str = facet("dtype of x", values=FLOATS, default="bfloat16")
    width: int = facet("elements of a row of the result", default=4096)
    format: str = facet(f"form of the result: {', '.join(FORMATS)}", values=FORMATS, default=FP8_GROUP)
    scale_dtype: str = facet("dtype of the scales of fp8_token and fp8_group", values=FP8_SCALES, default="float32")
    ue8m0: bool = feature("scales are powers of two, rounded up", False)
    column: bool = feature("scales are column-major", False)


@dataclass(frozen=True)
class NormProblem(FusedProblem):
    """One configuration of `rms_norm_quant`."""

    weight_dtype: str = facet("dtype of the weight", values=FLOATS, default="bfloat16")
    residual: bool = feature("a residual is added first", False)
    unit_offset: bool = feature("the factor is 1 + weight", False)


@dataclass(frozen=True)
class ActivationProblem(FusedProblem):
    """One configuration of `silu_and_mul_quant`."""


def complete(facets: dict[str, Any]) -> dict[str, Any]:
    """Scales in float8_e8m0fnu are powers of two; weights have the dtype of x unless said."""
    implied = {"ue8m0": True} if facets.get("scale_dtype") == "float8_e8m0fnu" else {}
    return {**facets, **implied}


def norm_complete(facets: dict[str, Any]) -> dict[str, Any]:
    """The same; the weight has the dtype of x unless said."""
    return {"weight_dtype": facets.get("dtype", "bfloat16"), **complete(facets)}


def contradiction(problem: FusedProblem) -> str | None:
    """Problems that no call can have."""
    return form_contradiction(problem, problem.width)


def form_contradiction(problem: Any, width: int) -> str | None:
    """Why facets of the form of rows of `width` contradict each other."""
    if problem.format not in SCALED:
        if problem.ue8m0 or problem.column or problem.scale_dtype != "float32":
            return f"ue8m0, column and scale_dtype belong to {' and '.join(SCALED)}, not to {problem.format}"
    elif problem.scale_dtype == "float8_e8m0fnu" and not problem.ue8m0:
        return "scales in float8_e8m0fnu are powers of two: ue8m0 is off"
    if problem.format == NVFP4 and width % 16:
        return f"width is {width}, not a multiple of nvfp4's groups of 16"
    return None


def regime(problem: FusedProblem) -> str:
    """Order lines distinguish float8 with scales of its own from other forms, of which few are timed."""
    return SCALES if problem.format in SCALED else OTHERS


RMS_NORM_QUANT = OpRecord(
    name="rms_norm_quant",
    summary="RMSNorm, after an addition to the residual, as floats, float8 or float4 with scales",
    problem=NormProblem,
    complete=norm_complete,
    contradiction=contradiction,
    regimes=(SCALES, OTHERS),
    regime=regime,
)
SILU_AND_MUL_QUANT = OpRecord(
    name="silu_and_mul_quant",
    summary="SiLU of the gate times up, as floats, float8 or float4 with scales",
    problem=ActivationProblem,
    complete=complete,
    contradiction=contradiction,
    regimes=(SCALES, OTHERS),
    regime=regime,
)
