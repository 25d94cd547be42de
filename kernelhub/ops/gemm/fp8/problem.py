"""Facets and constraints of `fp8_gemm`."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import CHECKPOINT, facet, feature, weight_layout
from kernelhub.probes.device import DeviceFacts

FLOATS = ("bfloat16", "float16", "float32")
HALVES = FLOATS[:2]
FLOAT, E8M0 = "float32", "float8_e8m0fnu"
TENSOR, ROW, BLOCK, ROW_BLOCK, MX = "tensor", "row", "block", "row_block", "mx"
SCALINGS = (TENSOR, ROW, BLOCK, ROW_BLOCK, MX)
GROUP = {BLOCK: 128, ROW_BLOCK: 128, MX: 32}  # columns that a scale is for

# Rows of a: those of decode, of larger batches of it, or of prefill.
FEW, SOME, MANY = ROWS = ("few", "some", "many")
MOST_FEW, MOST_SOME = 16, 64
# Columns of a from which on order lines of some rows scaled by block are others, and others again.
_MIDDLE_K, _LONG_K = 2048, 4096


@dataclass(frozen=True)
class Fp8GemmProblem:
    """One configuration of `fp8_gemm`."""

    device: DeviceFacts = facet("where the tensors are")
    scaling: str = facet(
        "scales: one a tensor; one a row of a, of b or of both; 1 x 128 by 128 x 128, or (row_block) by 1 x 128; "
        "1 x 32 by 1 x 32",
        values=SCALINGS,
        default=BLOCK,
    )
    n: int = facet("rows of b, columns of the result", default=4096)
    k: int = facet("columns of a and b", default=4096)
    rows: str = facet(f"rows of a: few (up to {MOST_FEW}), some (up to {MOST_SOME}), many", values=ROWS, default=FEW)
    out_dtype: str = facet("dtype of the result", values=FLOATS, default="bfloat16")
    a_scale_dtype: str = facet("dtype of a's scales", values=(FLOAT, E8M0), default=FLOAT)
    b_scale_dtype: str = facet("dtype of b's scales", values=(FLOAT, E8M0), default=FLOAT)
    weight_layout: str = weight_layout()
    weight_only: str | None = feature(
        "dtype of activations that are not quantised: the weights alone are", None, HALVES
    )
    e5m2: bool = feature("activations are float8_e5m2", False)
    bias: bool = feature("a bias is added", False)


def complete(facets: dict[str, object]) -> dict[str, object]:
    """Of 1 x 32 blocks, scales can only be e8m0."""
    if facets.get("scaling") == MX:
        return {"a_scale_dtype": E8M0, "b_scale_dtype": E8M0, **facets}
    return facets


def contradiction(problem: Fp8GemmProblem) -> str | None:
    """Scales that do not go with the scaling."""
    if problem.weight_only is None and problem.weight_layout != CHECKPOINT:
        return "weights are packed for activations that are not quantised only; give weight_only"
    if problem.weight_only is not None:
        if problem.e5m2:
            return "weight_only says that activations are not quantised, and e5m2 that they are"
        if problem.scaling == MX:
            return "weight_only has no 1 x 32 blocks; those scale both operands"
        if problem.scaling in (TENSOR, ROW) and problem.b_scale_dtype == E8M0:
            return f"scales of a {problem.scaling} are float32"
        return None if problem.a_scale_dtype == FLOAT else "a_scale_dtype is of scales that weight_only lacks"
    dtypes = {problem.a_scale_dtype, problem.b_scale_dtype}
    if problem.scaling == MX and FLOAT in dtypes:
        return "scales of 1 x 32 blocks are float8_e8m0fnu"
    if problem.scaling in (TENSOR, ROW) and E8M0 in dtypes:
        return f"scales of a {problem.scaling} are float32"
    return None


def rows_of(count: int) -> str:
    """The facet `rows` of a call with so many rows."""
    return FEW if count <= MOST_FEW else SOME if count <= MOST_SOME else MANY


_BATCH, _LONG_BATCH = "block_batch", "block_long_batch"
REGIMES = (
    TENSOR,
    *("row_decode", "row_prefill"),
    *("block_decode", _BATCH, _LONG_BATCH, "block_prefill"),
    ROW_BLOCK,
    MX,
    "weight_only",
)


def regime(problem: Fp8GemmProblem) -> str:
    """Order lines distinguish scalings, weight-only products, and of scales per row and block up to 64 rows from more.

    Of scales per block some rows are ``block_batch`` if K is 2048 or more, and ``block_long_batch`` from 4096 on.
    """
    if problem.weight_only is not None:
        return "weight_only"
    if problem.scaling == BLOCK and problem.rows == SOME and problem.k >= _MIDDLE_K:
        return _LONG_BATCH if problem.k >= _LONG_K else _BATCH
    if problem.scaling in (ROW, BLOCK):
        return f"{problem.scaling}_{'prefill' if problem.rows == MANY else 'decode'}"
    return problem.scaling


FP8_GEMM = OpRecord(
    name="fp8_gemm",
    summary="a product of float8 matrices, scaled by tensor, row or block",
    problem=Fp8GemmProblem,
    complete=complete,
    contradiction=contradiction,
    regimes=REGIMES,
    regime=regime,
)
