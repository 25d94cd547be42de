"""Facets of the collectives."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import facet, feature
from kernelhub.ops.fused_quant.problem import FORMATS, FP8_GROUP, NONE, NVFP4, form_contradiction
from kernelhub.ops.fused_quant.problem import complete as complete_form
from kernelhub.ops.quant.problem import FP8_SCALES
from kernelhub.probes.device import DeviceFacts

FLOATS = ("float32", "float16", "bfloat16")
MOVED = (*FLOATS, "float8_e4m3fn", "uint8", "int32", "int64")
USUAL, OTHER = "usual", "other"
UNKNOWN, NVLINK, PCIE, NETWORK, NO_LINK = "unknown", "nvlink", "pcie", "network", "none"
LINKS = (UNKNOWN, NVLINK, PCIE, NETWORK, NO_LINK)
ATOMICS, ACCESS, NO_ACCESS = "atomics", "access", "none"
PEERS = (UNKNOWN, ATOMICS, ACCESS, NO_ACCESS)
# Buckets of the bytes of a message, by their upper bounds. Edges are where the fastest kernel changes on Hopper GPUs.
ANY, MORE = "any", "more"
MESSAGE_BYTES = {"32KB": 32 << 10, "256KB": 256 << 10, "1MB": 1 << 20, "8MB": 8 << 20, "32MB": 32 << 20}
BUCKETS = (*MESSAGE_BYTES, MORE)
MESSAGES = (ANY, *BUCKETS)
_BOUNDS = tuple(MESSAGE_BYTES.values())
NO_NVLINK = "no nvlink"
_TIMED_WIDE = "2 ranks, 1MB"  # a regime
WIDE_ROWS = f"{_TIMED_WIDE}, wide rows"  # of `all_reduce_rms_norm`
_LEAST_WIDE = 4096  # the narrowest rows that were timed there
# The narrowest rows that one cluster each normalises faster, by bucket of a message of two ranks.
_LEAST_CLUSTERED = {"32KB": 7168, "1MB": 5120}
CLUSTERED_ROWS = {f"2 ranks, {bucket}": f"2 ranks, {bucket}, rows of clusters" for bucket in _LEAST_CLUSTERED}
NVFP4_ROWS = "4 ranks, 32KB, nvfp4"  # of `all_reduce_rms_norm`: the form that one launch makes faster than two
_SIZES = (2, 4, 8)  # numbers of ranks with order lines of their own


def bucket_of(num_bytes: int) -> str:
    """The bucket of a message."""
    return BUCKETS[bisect.bisect_left(_BOUNDS, num_bytes)]


@dataclass(frozen=True)
class CollectiveProblem:
    """The facets that all collectives have. They are equal on all ranks that run devices of one kind."""

    device: DeviceFacts = facet("where the tensors are")
    dtype: str = facet("dtype of x", values=FLOATS, default="bfloat16")
    world_size: int = facet("ranks of the group", default=1)
    group_backend: str = facet(
        "the group's backend for the device: usual (NCCL for a GPU, gloo for a CPU), other",
        values=(USUAL, OTHER),
        default=USUAL,
    )
    link: str = facet(
        "weakest connection of two ranks: nvlink, pcie, network (several machines or containers), none (a CPU, MIG, no "
        "peer access, or turned off), unknown (no plan was prepared in the group)",
        values=LINKS,
        default=UNKNOWN,
    )
    peers: str = facet(
        "what a probe of every ordered pair of GPUs proved: atomics, access (loads and stores), none, unknown",
        values=PEERS,
        default=UNKNOWN,
    )
    message: str = facet(
        "bytes of a rank's message, as the upper bound of a bucket; any: the group has no kernel that depends on it",
        values=MESSAGES,
        default=ANY,
    )


@dataclass(frozen=True)
class AllReduceProblem(CollectiveProblem):
    """One configuration of `all_reduce`."""


@dataclass(frozen=True)
class AllReduceRmsNormProblem(CollectiveProblem):
    """One configuration of `all_reduce_rms_norm`."""

    hidden_size: int = facet("elements of a row", default=4096)
    weight_dtype: str = facet("dtype of the weight: as x, or float32", values=FLOATS, default="bfloat16")
    format: str = facet(f"form of the norm: {', '.join(FORMATS)}", values=FORMATS, default=NONE)
    scale_dtype: str = facet("dtype of the scales of fp8_token and fp8_group", values=FP8_SCALES, default="float32")
    ue8m0: bool = feature("scales are powers of two, rounded up", False)
    column: bool = feature("scales are column-major", False)


@dataclass(frozen=True)
class ReduceScatterProblem(CollectiveProblem):
    """One configuration of `reduce_scatter`."""


@dataclass(frozen=True)
class AllGatherProblem(CollectiveProblem):
    """One configuration of `all_gather`."""

    dtype: str = facet("dtype of x", values=MOVED, default="bfloat16")
    unequal: bool = feature("rows of each rank are given", False)


def regime(problem: Any) -> str:
    """Size of the group and bucket of the message, where NVLink connects the ranks."""
    if problem.link != NVLINK:
        return NO_NVLINK
    ranks = str(problem.world_size) if problem.world_size in _SIZES else "other"
    return f"{ranks} ranks, {problem.message}"


def regime_of_norm(problem: AllReduceRmsNormProblem) -> str:
    """The same, whether rows in 16 bits are as wide as those whose norm was timed up to 1 MB of two ranks, and NVFP4.

    Clusters have normalised rows on GPUs only by weights of their dtype.
    """
    found = regime(problem)
    if problem.format == NVFP4 and NVFP4_ROWS.startswith(f"{found},"):
        return NVFP4_ROWS
    if problem.dtype == "float32" or problem.format != NONE:
        return found
    least = _LEAST_CLUSTERED.get(problem.message, 0)
    if found in CLUSTERED_ROWS and problem.weight_dtype == problem.dtype and problem.hidden_size >= least:
        return CLUSTERED_ROWS[found]
    return WIDE_ROWS if found == _TIMED_WIDE and problem.hidden_size >= _LEAST_WIDE else found


def contradiction(problem: Any) -> str | None:
    """Why facets of connections contradict each other."""
    if problem.link == NVLINK and problem.peers == NO_ACCESS:
        return "link is nvlink, and peers is none"
    if problem.link in (NETWORK, NO_LINK) and problem.peers in (ATOMICS, ACCESS):
        return f"link is {problem.link}, and peers is {problem.peers}"
    return None


def contradiction_of_norm(problem: AllReduceRmsNormProblem) -> str | None:
    """The same, and why facets of the form of the norm do."""
    return contradiction(problem) or form_contradiction(problem, problem.hidden_size)


def complete(facets: dict[str, Any]) -> dict[str, Any]:
    """NVLink has atomics, unless said otherwise."""
    link, given = facets.get("link"), dict(facets)
    if link == NVLINK:
        given.setdefault("peers", ATOMICS)
    elif link in (NETWORK, NO_LINK):
        given.setdefault("peers", NO_ACCESS)
    return given


def complete_norm(facets: dict[str, Any]) -> dict[str, Any]:
    """The weight has the dtype of x, and options of scales are those of fp8_group, unless said otherwise.

    Scales in float8_e8m0fnu are powers of two.
    """
    given = complete_form(complete(facets))
    if given.get("ue8m0") or given.get("column") or "scale_dtype" in given:
        given.setdefault("format", FP8_GROUP)
    if "dtype" in given:
        given.setdefault("weight_dtype", given["dtype"])
    return given


REGIMES = (
    NO_NVLINK,
    *(f"{ranks} ranks, {message}" for ranks in (*_SIZES, "other") for message in MESSAGES),
)
ALL_REDUCE = OpRecord(
    name="all_reduce",
    summary="the sum of a tensor over the ranks of a process group",
    problem=AllReduceProblem,
    complete=complete,
    contradiction=contradiction,
    regimes=REGIMES,
    regime=regime,
)
ALL_REDUCE_RMS_NORM = OpRecord(
    name="all_reduce_rms_norm",
    summary="the sum of a tensor over the ranks of a process group, plus a residual, and its RMSNorm, as floats or as "
    "float8 or float4 with scales",
    problem=AllReduceRmsNormProblem,
    complete=complete_norm,
    contradiction=contradiction_of_norm,
    regimes=(*REGIMES, WIDE_ROWS, *CLUSTERED_ROWS.values(), NVFP4_ROWS),
    regime=regime_of_norm,
)
REDUCE_SCATTER = OpRecord(
    name="reduce_scatter",
    summary="the sum of a tensor over the ranks of a process group, a part of the rows for each rank",
    problem=ReduceScatterProblem,
    complete=complete,
    contradiction=contradiction,
    regimes=REGIMES,
    regime=regime,
)
ALL_GATHER = OpRecord(
    name="all_gather",
    summary="the rows of all ranks of a process group",
    problem=AllGatherProblem,
    complete=complete,
    contradiction=contradiction,
    regimes=REGIMES,
    regime=regime,
)
