"""Facets of the collectives."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import facet
from kernelhub.probes.device import DeviceFacts

FLOATS = ("float32", "float16", "bfloat16")
USUAL, OTHER = "usual", "other"


@dataclass(frozen=True)
class AllReduceProblem:
    """One configuration of `all_reduce`. Its facets are equal on all ranks that run devices of one kind."""

    device: DeviceFacts = facet("where x is")
    dtype: str = facet("dtype of x", values=FLOATS, default="bfloat16")
    world_size: int = facet("ranks of the group", default=1)
    group_backend: str = facet(
        "the group's backend for the device: usual (NCCL for a GPU, gloo for a CPU), other",
        values=(USUAL, OTHER),
        default=USUAL,
    )


ALL_REDUCE = OpRecord(
    name="all_reduce",
    summary="the sum of a tensor over the ranks of a process group",
    problem=AllReduceProblem,
)
