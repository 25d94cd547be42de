"""Facets and constraints of `bmm_fp8`."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import facet, feature
from kernelhub.ops.gemm.fp8.problem import FLOATS
from kernelhub.probes.device import DeviceFacts

TENSOR, BATCH = "tensor", "batch"
SCALINGS = (TENSOR, BATCH)


@dataclass(frozen=True)
class BmmFp8Problem:
    """One configuration of `bmm_fp8`."""

    device: DeviceFacts = facet("where the tensors are")
    a_scaling: str = facet("scales of a: one a tensor, or one a matrix of the batch", values=SCALINGS, default=TENSOR)
    b_scaling: str = facet("scales of b: one a tensor, or one a matrix of the batch", values=SCALINGS, default=TENSOR)
    n: int = facet("rows of each b, columns of each result", default=512)
    k: int = facet("columns of each a and b", default=128)
    out_dtype: str = facet("dtype of the result", values=FLOATS, default="bfloat16")
    e5m2: str | None = feature("the operand that is float8_e5m2", None, ("a", "b"))


BMM_FP8 = OpRecord(
    name="bmm_fp8",
    summary="a product of float8 matrices for each of a batch",
    problem=BmmFp8Problem,
)
