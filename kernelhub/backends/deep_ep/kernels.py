"""Records of DeepEP's kernels for high throughput."""

from __future__ import annotations

from typing import Any

from kernelhub.backends.deep_ep.requirements import COMBINE_MACHINE, DISPATCH_MACHINE
from kernelhub.dispatch.constraint import Between, MultipleOf, OneOf, Rule, anything, dtype_in
from kernelhub.dispatch.kernel import Backend, Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import verified
from kernelhub.ops.comm.experts.problem import EXACT, FEW, FP8, KEPT, MANY
from kernelhub.ops.comm.links import ONE_NODE_SIZES
from kernelhub.ops.comm.problem import ACCESS, ATOMICS, NVLINK, USUAL

BACKEND = Backend(
    "deep_ep",
    "DeepEP 1.2: tokens to experts on the other GPUs of a machine, and back",
    "deep_ep",
    "https://github.com/deepseek-ai/DeepEP",
)

_PREPARE = "call the op's prepare on every rank, and run its plan"
_STORES = "it stores in the memory of all other ranks' GPUs"
_MOST_LOCAL, _MOST_CHOICES = 128, 32
_WAITS = "ends the process after waiting 100 s for another rank"


def _local(problem: Any) -> str | None:
    local = problem.num_experts // problem.world_size
    if local <= _MOST_LOCAL:
        return None
    return f"a rank has {local} experts, more than the {_MOST_LOCAL} threads that count their rows"


def _row(problem: Any) -> str | None:
    """Two halves of a row, in units of 16 bytes, each of which fits what a warp holds, 8192 bytes with a barrier."""
    size = problem.hidden_size * (1 if problem.dtype == FP8 else 2)
    if size % 32 or size > 2 * (8192 - 16):
        return f"a row has {size} bytes, not a multiple of 32 up to 16352"
    return None


def _groups(problem: Any) -> str | None:
    if problem.dtype == FP8 and problem.hidden_size % 128:
        return f"hidden_size is {problem.hidden_size}, which scales for 128 columns do not divide"
    return None


_RANKS: tuple[Any, ...] = (
    ONE_NODE_SIZES,
    OneOf("link", (NVLINK,), "link", _STORES, _PREPARE),
    OneOf("peers", (ATOMICS, ACCESS), "peers", _STORES, _PREPARE),
    OneOf("group_backend", (USUAL,), why="it exchanges addresses by NCCL"),
    Between("top_k", 1, _MOST_CHOICES, why="a warp has a choice for each thread"),
    Rule(("num_experts", "world_size"), _local, "num_experts"),
    anything("format"),
)


_EXACTLY = OneOf("capacity", (EXACT,), why="it returns as many rows as came", remedy="leave max_tokens out")
_FIXED = OneOf("capacity", (FEW, MANY), why="its shapes follow from max_tokens", remedy="give max_tokens")
_DISPATCH: tuple[Any, ...] = (
    *DISPATCH_MACHINE,
    dtype_in("dtype", "bfloat16", FP8),
    Rule(("hidden_size", "dtype"), _row, "hidden_size"),
    Rule(("hidden_size", "dtype"), _groups, "hidden_size"),
)
_COMBINE: tuple[Any, ...] = (
    *COMBINE_MACHINE,
    dtype_in("dtype", "bfloat16", why="its sums are of bfloat16"),
    MultipleOf("hidden_size", 8, why="a thread loads 16 bytes of a row"),
    OneOf("rows", (KEPT,), why="it reads the state that a dispatch of DeepEP leaves in the handle"),
)

_ON_HOPPER = verified(
    "hopper",
    evidence="NVIDIA H200, 2026-11-26, torch 2.11.0+cu130, DeepEP 1.2.1, two ranks over NVLink: 13 tests passed, none "
    "failed (benchmarks/results/expert_comm_h200.json); not run with other numbers of ranks",
)


def _kernel(op: str, target: str, summary: str, limits: tuple[Any, ...], features: Any, *, fixed: bool) -> Kernel:
    how = "no wait" if fixed else "the call waits for the numbers of rows"
    return Kernel(
        op=op,
        name="deep_ep.normal_fixed" if fixed else "deep_ep.normal",
        target=f"kernelhub.backends.deep_ep.normal:{target}",
        summary=f"{summary}; {how}; {_WAITS}" if op == "moe_dispatch" else f"{summary}; {_WAITS}",
        band=Band.PORTABLE,
        constraints=(*limits, *_RANKS, _FIXED if fixed else _EXACTLY),
        features=features,
        graph=GraphLevel.FULL if fixed else GraphLevel.NONE,
        deterministic=True,
        gives=KEPT if op == "moe_dispatch" else "",
        source="DeepEP",
        standings=(_ON_HOPPER,),
    )


KERNELS = tuple(
    _kernel(*given, fixed=fixed)
    for given in (
        (
            "moe_dispatch",
            "Dispatch",
            "each token to the ranks that need it, once, over NVLink",
            _DISPATCH,
            frozenset({"scales"}),
        ),
        (
            "moe_combine",
            "Combine",
            "sums of each rank to the ranks of their tokens over NVLink, which add them in float32 in the order of "
            "ranks",
            _COMBINE,
            frozenset(),
        ),
    )
    for fixed in (False, True)
)
