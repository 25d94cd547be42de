"""Facets and constraints of `fp4_gemm`."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import bucket, facet, feature, weight_layout
from kernelhub.probes.device import DeviceFacts

NVFP4, MXFP4, MXFP8, FP8 = "nvfp4", "mxfp4", "mxfp8", "fp8"
A_FORMATS = ("bfloat16", "float16", FP8, MXFP8, NVFP4, MXFP4)
B_FORMATS = (NVFP4, MXFP4)
OUT_DTYPES = ("bfloat16", "float16", "float32")
GROUP = {NVFP4: 16, MXFP4: 32, MXFP8: 32}

# Rows of a: those of decode, of large batches, or of prefill.
FEW, SOME, MANY = ROWS = ("few", "some", "many")
MOST_FEW, MOST_SOME = 64, 256


@dataclass(frozen=True)
class Fp4GemmProblem:
    """One configuration of `fp4_gemm`."""

    device: DeviceFacts = facet("where the tensors are")
    a_format: str = facet("number format of a", values=A_FORMATS, default="bfloat16")
    b_format: str = facet("number format of b", values=B_FORMATS, default=NVFP4)
    out_dtype: str = facet("dtype of the result", values=OUT_DTYPES, default="bfloat16")
    n: int = facet("rows of b, columns of the result", default=8192)
    k: int = facet("elements that are summed over", default=8192)
    rows: str = bucket(f"rows of a: few (up to {MOST_FEW}), some (up to {MOST_SOME}), many", values=ROWS, default=FEW)
    weight_layout: str = weight_layout()
    bias: bool = feature("a bias is added", False)


def multiple_of_k(a_format: str, b_format: str) -> int:
    """K must be a multiple of this number."""
    return max(GROUP.get(a_format, 1), GROUP[b_format])


def contradiction(problem: Fp4GemmProblem) -> str | None:
    """Features that exclude each other."""
    multiple = multiple_of_k(problem.a_format, problem.b_format)
    if problem.k % multiple:
        nearest = -(-problem.k // multiple) * multiple
        return f"k is {problem.k}; groups of {multiple} need a multiple, the nearest is {nearest}"
    return None


def rows_of(count: int) -> str:
    """The facet `rows` of a call with so many rows."""
    return FEW if count <= MOST_FEW else SOME if count <= MOST_SOME else MANY


REGIMES = (FEW, SOME, "nvfp4_many", "mxfp4_many")


def regime(problem: Fp4GemmProblem) -> str:
    """Order lines distinguish few rows, some, and many, of these by the format of the weight."""
    return f"{problem.b_format}_{MANY}" if problem.rows == MANY else problem.rows


FP4_GEMM = OpRecord(
    name="fp4_gemm",
    summary="activations times a float4 weight",
    problem=Fp4GemmProblem,
    contradiction=contradiction,
    regimes=REGIMES,
    regime=regime,
)
