"""Facets and constraints of `merge_attention_states`."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import facet, feature
from kernelhub.probes.device import DeviceFacts

FLOATS = ("float32", "float16", "bfloat16")
TWO, MANY = "two", "many"
OUT_SCALES = ("value", "tensor")


@dataclass(frozen=True)
class MergeProblem:
    """One configuration of `merge_attention_states`."""

    device: DeviceFacts = facet("where the tensors are")
    dtype: str = facet("dtype of the results", values=FLOATS, default="bfloat16")
    num_heads: int = facet("heads", default=32)
    head_dim: int = facet("width of a head", default=128)
    parts: str = facet("how many states: two, many", values=(TWO, MANY), default=TWO)
    batched: bool = feature("states of batches, [B, S, H, D]", False)
    lse: bool = feature("the merged LSE is returned", False)
    out_scale: str | None = feature("how the scale of a float8_e4m3fn result is given", None, OUT_SCALES)


MERGE_ATTENTION_STATES = OpRecord(
    name="merge_attention_states",
    summary="attention over parts of the keys merged into attention over all of them",
    problem=MergeProblem,
)
