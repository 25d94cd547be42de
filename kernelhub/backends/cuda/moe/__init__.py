"""Records of the CUDA kernels of mixtures of experts."""

from __future__ import annotations

from kernelhub.backends.cuda.requirements import MACHINE
from kernelhub.backends.cuda.standings import standings
from kernelhub.dispatch.constraint import Between, Rule, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.moe.routing.problem import FLOATS, RoutingProblem

_LANES, _MOST_OF_A_LANE = 32, 32  # of a warp


def lanes_of_group(num_groups: int) -> int:
    """Lanes of a warp for each group, if groups are padded to a power of two."""
    return _LANES >> (num_groups - 1).bit_length()


def experts_of_lane(problem: RoutingProblem) -> int:
    """Experts that a lane keeps."""
    return -(-(problem.num_experts // problem.num_groups) // lanes_of_group(problem.num_groups))


def _in_registers(problem: RoutingProblem) -> str | None:
    if not 1 <= problem.num_groups <= _LANES or experts_of_lane(problem) <= _MOST_OF_A_LANE:
        return None  # the range of num_groups has its own limit
    groups = f" in {problem.num_groups} groups" if problem.num_groups > 1 else ""
    return f"{problem.num_experts} experts{groups} are more than {_MOST_OF_A_LANE} for a lane of a warp"


KERNELS = (
    Kernel(
        op="route_experts",
        name="cuda.routing",
        target="kernelhub.backends.cuda.moe.routing:Routing",
        summary="a token by a warp, experts in registers, each choice two reductions of the warp",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            dtype_in("dtype", *FLOATS),
            Between("num_groups", 1, _LANES, why="each has a lane of a warp, at least"),
            Between("top_k", 1, 64, why="lanes of a warp hold the experts of a token, two each"),
            Rule(("num_experts", "num_groups"), _in_registers, code="range"),
            anything("topk_groups"),
        ),
        features=frozenset(
            {"scoring=sigmoid", "scoring=softmax_after_topk", "correction_bias", "renormalize", "scaling_factor"}
        ),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        compiles_when_made=True,
        source="DeepSeek-V2 and V3 (2024), section 2.1.2",
        standings=standings("route_experts", 56, date_on_h100="2026-11-26"),
    ),
)
