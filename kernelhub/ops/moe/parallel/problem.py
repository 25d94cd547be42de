"""Facets of `expert_parallel_moe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import facet, feature
from kernelhub.ops.comm.experts.problem import CAPACITIES, FEW
from kernelhub.ops.comm.problem import LINKS, OTHER, PEERS, UNKNOWN, USUAL
from kernelhub.ops.comm.problem import complete as connected
from kernelhub.ops.comm.problem import contradiction as contradiction_of_links
from kernelhub.ops.moe.experts.problem import (
    ACTIVATIONS,
    ASKED_FORMATS,
    FLOATS,
    FORMATS,
    FP8,
    FP8_FORMATS,
    PLAIN,
    SILU,
)
from kernelhub.probes.device import DeviceFacts


@dataclass(frozen=True)
class ParallelProblem:
    """One configuration of `expert_parallel_moe`. Its facets are equal on all ranks that run devices of one kind."""

    device: DeviceFacts = facet("where the tensors are")
    dtype: str = facet("dtype of the tokens and of the result", values=FLOATS, default="bfloat16")
    weights: str = facet("format of the weights, as of fused_moe", values=FORMATS, default=PLAIN)
    activation_dtype: str = facet(
        "dtype that weights are multiplied by, or an opt-in format, as of fused_moe",
        values=(*FLOATS, FP8, *ASKED_FORMATS),
        default="bfloat16",
    )
    num_experts: int = facet("experts of all ranks", default=256)
    top_k: int = facet("experts that a token goes to", default=8)
    hidden_size: int = facet("width of a token", default=7168)
    intermediate_size: int = facet("width of an expert", default=2048)
    world_size: int = facet("ranks of the group", default=1)
    group_backend: str = facet(
        "the group's backend for the device: usual (NCCL for a GPU, gloo for a CPU), other",
        values=(USUAL, OTHER),
        default=USUAL,
    )
    capacity: str = facet("tokens of a rank: exact, or at most few (up to 256), many", values=CAPACITIES, default=FEW)
    link: str = facet(
        "weakest connection of two ranks, as of moe_dispatch; unknown before a plan was prepared in the group",
        values=LINKS,
        default=UNKNOWN,
    )
    peers: str = facet("what a probe of every ordered pair of GPUs proved, likewise", values=PEERS, default=UNKNOWN)
    activation: str = feature("activation that combines gate and up", SILU, ACTIVATIONS[1:])
    w13_bias: bool = feature("a bias of gate and up", False)
    w2_bias: bool = feature("a bias of the down projection", False)


def complete(facets: dict[str, Any]) -> dict[str, Any]:
    """Weights of float8 are multiplied by float8, others by the dtype of the tokens. NVLink has atomics."""
    facets = connected(facets)
    usual = FP8 if facets.get("weights") in FP8_FORMATS else facets.get("dtype", "bfloat16")
    return {"activation_dtype": usual} | facets


def contradiction(problem: ParallelProblem) -> str | None:
    """Problems that no call can have."""
    if problem.num_experts % problem.world_size:
        return f"num_experts is {problem.num_experts}, which {problem.world_size} ranks cannot share equally"
    return contradiction_of_links(problem)


def _capacity(problem: ParallelProblem) -> str:
    return problem.capacity


EXPERT_PARALLEL_MOE = OpRecord(
    name="expert_parallel_moe",
    summary="run tokens through experts that are spread over ranks",
    problem=ParallelProblem,
    complete=complete,
    contradiction=contradiction,
    regimes=CAPACITIES,
    regime=_capacity,
)
