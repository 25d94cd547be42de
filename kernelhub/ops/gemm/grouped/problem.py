"""Facets and constraints of `grouped_gemm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import facet, feature
from kernelhub.probes.device import DeviceFacts

FLOATS = ("float32", "float16", "bfloat16")
FP8, FP4 = "float8_e4m3fn", "float4_e2m1fn_x2"

# Geometries of scales. Of those that end in e8m0 the scales are powers of two (UE8M0), else float32.
GROUPS = ("group", "group_e8m0")  # of a, one per row and 128 columns
BLOCKS = ("block", "block_e8m0")  # of b, one per 128 x 128
FP4_SCALES = ("nvfp4", "mxfp4")  # of fp4, one per row and 16 or 32 columns
SMALL = (*FP4_SCALES, "mxfp8")  # of rows of either operand, one per row and 16 or 32 columns
A_SCALES = ("tensor", "token", *GROUPS, *SMALL)
B_SCALES = ("tensor", "channel", *BLOCKS, *SMALL)
BLOCK = 128  # rows and columns that a scale of `GROUPS` or `BLOCKS` is for
SPAN = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}  # columns that a scale of `SMALL` is for
# Of rows that have scales of `SMALL`, what the weights may have.
PARTNERS = {"nvfp4": ("nvfp4",), "mxfp4": ("mxfp4",), "mxfp8": ("mxfp8", "mxfp4")}

FP4_ROWS = "fp4 weights take float16 or bfloat16 rows, or rows in mxfp8, or of their own format"

# How many rows a group has on average, or at most where they are masked: those of decode, or of prefill.
FEW, MANY = "few", "many"
MOST_FEW = 64


@dataclass(frozen=True)
class GroupedGemmProblem:
    """One configuration of `grouped_gemm`."""

    device: DeviceFacts = facet("where the tensors are")
    a_dtype: str = facet("dtype of the rows", values=(*FLOATS, FP8, FP4), default="bfloat16")
    b_dtype: str = facet("dtype of the weights", values=(*FLOATS, FP8, FP4), default="bfloat16")
    out_dtype: str = facet("dtype of the result", values=FLOATS, default="bfloat16")
    num_groups: int = facet("groups, which are experts", default=128)
    n: int = facet("columns of the result", default=1536)
    k: int = facet("columns of the rows", default=2048)
    rows: str = facet("rows of a group on average: few (up to 64), many", values=(FEW, MANY), default=FEW)
    masked: bool = feature("rows of each group padded to [G, M_max, K], with group_sizes", False)
    a_scale: str | None = feature("geometry of the scales of fp8 or fp4 rows", None, A_SCALES)
    b_scale: str | None = feature("geometry of the scales of fp8 or fp4 weights", None, B_SCALES)
    a_global_scale: bool = feature("one more factor per group of NVFP4 rows", False)
    global_scale: bool = feature("one more factor per group of NVFP4 weights", False)
    bias: bool = feature("a bias per group and column", False)

    @property
    def scaled_by_blocks(self) -> bool:
        """Scales are per 1 x 128 of the rows and 128 x 128 of the weights."""
        return self.b_scale in BLOCKS


def complete(facets: dict[str, Any]) -> dict[str, Any]:
    """Facets that a user wrote out, with those that follow: dtypes from scales, scales from dtypes."""
    a_scale, b_scale = facets.get("a_scale"), facets.get("b_scale")
    a_dtype, b_dtype = facets.get("a_dtype", "bfloat16"), facets.get("b_dtype")
    if facets.get("a_global_scale"):
        a_scale = a_scale or "nvfp4"
    if a_scale is None and a_dtype == FP4:
        a_scale = b_scale or "nvfp4"
    if a_scale is None and (b_scale == "mxfp8" or (a_dtype == FP8 and b_scale in FP4_SCALES)):
        a_scale = "mxfp8"
    if a_scale in SMALL:
        b_scale = b_scale or a_scale
        scales = {"a_scale": a_scale, "b_scale": b_scale, "out_dtype": "bfloat16"}
        return {"a_dtype": _dtype_of(a_scale), "b_dtype": _dtype_of(b_scale), **scales} | facets
    if b_dtype == FP4 or b_scale in FP4_SCALES or facets.get("global_scale"):
        return {"b_dtype": FP4, "b_scale": "nvfp4", "out_dtype": a_dtype} | facets
    if a_scale or b_scale or FP8 in (a_dtype, b_dtype):
        blocks = a_scale in GROUPS or b_scale in BLOCKS or not (a_scale or b_scale)
        scales = {"a_scale": "group", "b_scale": "block"} if blocks else {"a_scale": "token", "b_scale": "channel"}
        return {"a_dtype": FP8, "b_dtype": FP8, **scales} | facets
    return {"b_dtype": a_dtype, "out_dtype": a_dtype} | facets


def _dtype_of(scale: str) -> str:
    return FP4 if scale in FP4_SCALES else FP8


def contradiction(problem: GroupedGemmProblem) -> str | None:
    """Problems that no call can have."""
    a, b, a_scale, b_scale = problem.a_dtype, problem.b_dtype, problem.a_scale, problem.b_scale
    quantised = (FP8, FP4)
    for of, dtype, scale in (("a", a, a_scale), ("b", b, b_scale)):
        if (dtype in quantised) != (scale is not None):
            return f"{of}_dtype is {dtype} with {of}_scale {scale}; scales belong to {FP8} and {FP4}"
        if (dtype == FP4) != (scale in FP4_SCALES):
            return f"{of}_scale is {scale} and {of}_dtype {dtype}; {' and '.join(FP4_SCALES)} belong to {FP4}"
    if a_scale is not None and a_scale in PARTNERS:
        if b_scale not in PARTNERS[a_scale]:
            return f"a_scale is {a_scale} and b_scale {b_scale}; it goes with {' or '.join(PARTNERS[a_scale])}"
    elif b_scale == "mxfp8":
        return f"b_scale is mxfp8 and a_scale {a_scale}; it goes with mxfp8"
    elif b == FP4:
        if a not in ("float16", "bfloat16"):
            return f"a_dtype is {a} with a_scale {a_scale}; {FP4_ROWS}"
    elif a != b:
        return f"a_dtype is {a} and b_dtype {b}; they must be equal except for fp4 weights"
    if (a_scale in GROUPS) != (b_scale in BLOCKS):
        return f"a_scale is {a_scale} and b_scale {b_scale}; 1 x 128 goes with 128 x 128 only"
    for name, given, scale in (
        ("a_global_scale", problem.a_global_scale, a_scale),
        ("global_scale", problem.global_scale, b_scale),
    ):
        if given and scale != "nvfp4":
            return f"{name} belongs to nvfp4 scales; here they are {scale}"
    return None


REGIMES = ("decode", "prefill", "prefill_long")
_LONG = 4096  # columns


def regime(problem: GroupedGemmProblem) -> str:
    """Order lines distinguish few rows from many, and long rows among those."""
    if problem.rows == FEW:
        return "decode"
    return "prefill_long" if problem.k >= _LONG else "prefill"


GROUPED_GEMM = OpRecord(
    name="grouped_gemm",
    summary="groups of rows, each times the weights of its group, which is an expert",
    problem=GroupedGemmProblem,
    complete=complete,
    contradiction=contradiction,
    regimes=REGIMES,
    regime=regime,
)
