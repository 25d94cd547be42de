"""Facets of `moe_dispatch` and `moe_combine`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import facet, feature
from kernelhub.ops.comm.problem import FLOATS, LINKS, OTHER, PEERS, UNKNOWN, USUAL
from kernelhub.ops.comm.problem import complete as connected
from kernelhub.ops.comm.problem import contradiction as contradiction_of_links
from kernelhub.probes.device import DeviceFacts

FP8 = "float8_e4m3fn"
BLOCK = 128  # columns that a scale of float8 rows is for
TOKENS, CONTIGUOUS, MASKED = FORMATS = ("tokens", "contiguous", "masked")
# How many tokens a rank may have: as many as it has in each call, or at most `max_tokens`, few (up to 256) or many.
EXACT, FEW, MANY = CAPACITIES = ("exact", "few", "many")
MOST_FEW = 256
# Which tokens a rank received, in the order of the ranks that they come from: all tokens of every rank; those that
# need an expert of this rank; `max_tokens` of every rank, padded; or as needed, with state in the handle that a combine
# of the library which sent them reads, and with a capacity behind them as many rows of no expert as there is room for.
ALL, NEEDED, FIXED, KEPT = ROWS = ("all", "needed", "fixed", "kept")
_LINK = "weakest connection of two ranks, as of all_reduce; unknown before a plan was prepared in the group"
_PEERS = "what a probe of every ordered pair of GPUs proved: atomics, access (loads and stores), none, unknown"
_GROUP_BACKEND = "the group's backend for the device: usual (NCCL for a GPU, gloo for a CPU), other"


def capacity_of(max_tokens: int | None) -> str:
    """The facet `capacity` of the most tokens of a rank."""
    if max_tokens is None:
        return EXACT
    return FEW if max_tokens <= MOST_FEW else MANY


@dataclass(frozen=True)
class DispatchProblem:
    """One configuration of `moe_dispatch`. Its facets are equal on all ranks that run devices of one kind."""

    device: DeviceFacts = facet("where x is")
    dtype: str = facet("dtype of x", values=(*FLOATS, FP8), default="bfloat16")
    hidden_size: int = facet("columns of x", default=7168)
    top_k: int = facet("choices of a token", default=8)
    num_experts: int = facet("experts of all ranks", default=256)
    world_size: int = facet("ranks of the group", default=1)
    group_backend: str = facet(_GROUP_BACKEND, values=(USUAL, OTHER), default=USUAL)
    capacity: str = facet("tokens of a rank: exact, or at most few (up to 256), many", values=CAPACITIES, default=FEW)
    format: str = facet("format of the received tokens", values=FORMATS, default=TOKENS)
    link: str = facet(_LINK, values=LINKS, default=UNKNOWN)
    peers: str = facet(_PEERS, values=PEERS, default=UNKNOWN)
    scales: bool = feature("float32 scales per row and 128 columns of x, dispatched with it", False)


def complete(facets: dict[str, Any]) -> dict[str, Any]:
    """float8 rows have scales, and NVLink has atomics."""
    facets = connected(facets)
    if facets.get("scales"):
        return {"dtype": FP8} | facets
    return {"scales": True} | facets if facets.get("dtype") == FP8 else facets


def contradiction(problem: DispatchProblem) -> str | None:
    """Problems that no call can have."""
    if (problem.dtype == FP8) != problem.scales:
        return f"dtype is {problem.dtype} and scales {problem.scales}; scales belong to {FP8}"
    if problem.num_experts % problem.world_size:
        return f"num_experts is {problem.num_experts}, which {problem.world_size} ranks cannot share equally"
    return contradiction_of_links(problem)


@dataclass(frozen=True)
class CombineProblem:
    """One configuration of `moe_combine`."""

    device: DeviceFacts = facet("where y is")
    dtype: str = facet("dtype of y", values=FLOATS, default="bfloat16")
    hidden_size: int = facet("columns of y", default=7168)
    top_k: int = facet("choices of a token", default=8)
    num_experts: int = facet("experts of all ranks", default=256)
    world_size: int = facet("ranks of the group", default=1)
    group_backend: str = facet(_GROUP_BACKEND, values=(USUAL, OTHER), default=USUAL)
    capacity: str = facet("tokens of a rank: exact, or at most few (up to 256), many", values=CAPACITIES, default=FEW)
    format: str = facet("format of y", values=FORMATS, default=TOKENS)
    rows: str = facet(
        "which tokens the dispatch kernel gave a rank: all, needed, fixed, kept (as needed, with state of its library)",
        values=ROWS,
        default=FIXED,
    )
    link: str = facet(_LINK, values=LINKS, default=UNKNOWN)
    peers: str = facet(_PEERS, values=PEERS, default=UNKNOWN)


def complete_combine(facets: dict[str, Any]) -> dict[str, Any]:
    """Tokens without a capacity come exactly; others are padded. NVLink has atomics."""
    facets = connected(facets)
    if facets.get("rows") in (ALL, NEEDED):
        return {"capacity": EXACT} | facets
    return {"rows": ALL} | facets if facets.get("capacity") == EXACT else facets


def contradiction_of_combine(problem: CombineProblem) -> str | None:
    """Problems that no call can have."""
    if problem.rows != KEPT and (problem.capacity == EXACT) != (problem.rows in (ALL, NEEDED)):
        return f"rows is {problem.rows} and capacity {problem.capacity}; {ALL} and {NEEDED} belong to {EXACT}"
    if problem.num_experts % problem.world_size:
        return f"num_experts is {problem.num_experts}, which {problem.world_size} ranks cannot share equally"
    return contradiction_of_links(problem)


_MEASURED = (2, 4)  # ranks, whose regimes are apart
REGIMES = (*CAPACITIES, *(f"{ranks} ranks, {capacity}" for ranks in _MEASURED for capacity in CAPACITIES))


def _regime(problem: DispatchProblem | CombineProblem) -> str:
    ranks = problem.world_size
    return f"{ranks} ranks, {problem.capacity}" if ranks in _MEASURED else problem.capacity


MOE_DISPATCH = OpRecord(
    name="moe_dispatch",
    summary="tokens to the ranks of their experts",
    problem=DispatchProblem,
    complete=complete,
    contradiction=contradiction,
    regimes=REGIMES,
    regime=_regime,
)
MOE_COMBINE = OpRecord(
    name="moe_combine",
    summary="results of experts back to the ranks of their tokens, weighed and summed",
    problem=CombineProblem,
    complete=complete_combine,
    contradiction=contradiction_of_combine,
    regimes=REGIMES,
    regime=_regime,
)
