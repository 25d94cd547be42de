"""What each rank does in the tests of ranks that give unlike arguments to calls which no `prepare` compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

import kernelhub
from kernelhub.errors import InvalidArgument, NoKernel
from tests.runtime.expert_scenes import tokens_of
from tests.runtime.world import attempt, variables

EXPERTS, MOST = 12, 9


def dispatched(rank: int, group: Any, **changes: Any) -> Any:
    given = {**tokens_of(rank, "random"), "group": group, "num_experts": EXPERTS, "max_tokens": MOST}
    return kernelhub.moe_dispatch(**given | changes)


def act(rank: int, size: int) -> dict[str, Any]:
    """Rank 1 gives something else to each call; after each, all ranks sum the same."""
    group, other = dist.group.WORLD, rank == 1
    ones, weight = torch.ones, torch.ones(8)
    plan = kernelhub.all_reduce.prepare(ones(4), group)
    sent = dispatched(rank, group)
    rows = [1, 2, 3]
    calls: dict[str, Callable[[], Any]] = {
        "shape": lambda: kernelhub.all_reduce(ones(4 + other), group),
        "large": lambda: kernelhub.all_reduce(ones(100_000 + 7 * other), group),
        "none": lambda: kernelhub.all_reduce(ones(0 if other else 4), group),
        "run": lambda: plan.run(ones(4 + other)),
        "dtype": lambda: kernelhub.all_reduce(ones(4, dtype=torch.float16 if other else torch.float32), group),
        "op": lambda: (kernelhub.all_gather if other else kernelhub.all_reduce)(ones(4), group),
        "other op": lambda: dispatched(rank, group) if other else kernelhub.all_reduce(ones(4), group),
        "norm": lambda: kernelhub.all_reduce_rms_norm(*[ones(2 + other, 8)] * 2, weight, 1e-5, group),
        "eps": lambda: kernelhub.all_reduce_rms_norm(*[ones(2, 8)] * 2, weight, 1e-5 * (1 + other), group),
        "scatter": lambda: kernelhub.reduce_scatter(ones(6 if other else 3, 2), group),
        "gather": lambda: kernelhub.all_gather(ones(4 + other, 2), group),
        "empty gather": lambda: kernelhub.all_gather(ones(int(other), 2), group),
        "rows": lambda: kernelhub.all_gather(ones(rank + 1, 2), group, rows=[1, 2, 4] if other else rows),
        "many rows": lambda: kernelhub.all_gather(ones(rank + 1, 300 + other, *[1] * 300), group, rows=rows),
        "room": lambda: dispatched(rank, group, max_tokens=MOST + other),
        "experts": lambda: dispatched(rank, group, num_experts=EXPERTS + size * other),
        "format": lambda: dispatched(rank, group, format="masked" if other else "tokens"),
        "kernel": lambda: dispatched(rank, group, backend=f"torch.{'gather' if other else 'all_to_all'}_fixed"),
        "results": lambda: kernelhub.moe_combine(sent.x.half() if other else sent.x, sent.handle, group),
    }
    answers = {}
    for name, call in calls.items():
        answers[name] = attempt(lambda call=call: str(call()))
        answers[name]["after"] = kernelhub.all_reduce(ones(3), group).tolist()
    return answers


def another_backend(rank: int, size: int) -> dict[str, str]:
    """Calls and plans in a group that has neither gloo nor NCCL, whose ranks call nothing else."""
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    assert fake_pg.FakeStore
    group, ones = dist.new_group(backend="fake"), torch.ones
    norm = {"x": ones(2, 8), "residual": ones(2, 8), "weight": ones(8), "eps": 1e-5, "group": group}
    tokens = {**tokens_of(rank, "random"), "group": group, "num_experts": EXPERTS}
    local, like = EXPERTS // size, tokens["x"]
    experts = {"w13": like.new_ones(local, 4, 130), "w2": like.new_ones(local, 130, 2)}
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: kernelhub.all_reduce(ones(4), group),
        "all_reduce_rms_norm": lambda: kernelhub.all_reduce_rms_norm(**norm),
        "reduce_scatter": lambda: kernelhub.reduce_scatter(ones(size), group),
        "all_gather": lambda: kernelhub.all_gather(ones(4), group),
        "moe_dispatch": lambda: kernelhub.moe_dispatch(**tokens),
        "all_reduce.prepare": lambda: kernelhub.all_reduce.prepare(ones(4), group),
        "all_reduce_rms_norm.prepare": lambda: kernelhub.all_reduce_rms_norm.prepare(**norm),
        "moe_dispatch.prepare": lambda: kernelhub.moe_dispatch.prepare(**tokens),
        "expert_parallel_moe.prepare": lambda: kernelhub.expert_parallel_moe.prepare(
            **{name: value for name, value in tokens.items() if name != "num_experts"}, **experts
        ),
    }
    answers = {}
    for name, call in calls.items():
        try:
            answers[name] = str(call())
        except NoKernel as error:
            answers[name] = f"NoKernel: {error}"
    return answers


def parts(rank: int, size: int) -> dict[str, Any]:
    """Ranks 1 and 2 of the world differ in a group of their own."""
    part = dist.new_group([1, 2])
    return attempt(lambda: str(kernelhub.all_reduce(torch.ones(rank), part))) if rank else {}


def act_compared(rank: int, size: int) -> dict[str, Any]:
    """The same calls, and a whole layer of experts, where KERNELHUB_CHECK=1 has the ranks compare them."""
    group, other = dist.group.WORLD, rank == 1
    local = EXPERTS // size
    experts = {"w13": torch.ones(local, 4, 130).bfloat16(), "w2": torch.ones(local, 130, 2).bfloat16()}
    given = {**tokens_of(rank, "random"), **experts, "group": group, "max_tokens": MOST + other}
    with variables(KERNELHUB_CHECK="1"):
        answers = act(rank, size)
        answers["layer"] = attempt(lambda: str(kernelhub.expert_parallel_moe(**given)))
        answers["layer"]["after"] = kernelhub.all_reduce(torch.ones(3), group).tolist()
    return answers


def refused(rank: int, size: int) -> dict[str, Any]:
    """Rank 1 cannot make its call, and the others compare theirs with it; after each, all ranks sum the same."""
    group, other, ones, weight = dist.group.WORLD, rank == 1, torch.ones, torch.ones(8)
    plan = kernelhub.all_reduce.prepare(ones(4), group)
    tokens = {**tokens_of(rank, "random"), "group": group, "num_experts": EXPERTS, "max_tokens": MOST}
    exchange = kernelhub.moe_dispatch.prepare(**tokens)
    count = MOST + 1 if other else len(tokens["x"])
    more = {"x": ones(count, 130).bfloat16(), "topk_ids": ones(count, 3).int(), "topk_weights": ones(count, 3)}
    sent = kernelhub.moe_dispatch(**tokens)
    merge = kernelhub.moe_combine.prepare(sent.x, sent.handle, group)
    local = EXPERTS // size
    experts = {"w13": ones(local, 4, 130).bfloat16(), "w2": ones(local, 130, 2).bfloat16()}
    layer = {**tokens_of(rank, "random"), **experts, "group": group, "max_tokens": MOST}
    bad: Any = ones(4, dtype=torch.int64) if other else ones(4)
    overlapping = ones(8)
    out = overlapping[1:5] if other else None
    calls: dict[str, Callable[[], Any]] = {
        "dtype": lambda: kernelhub.all_reduce(bad, group),
        "no tensor": lambda: kernelhub.all_reduce(None if other else ones(4), group),  # type: ignore[arg-type]
        "place": lambda: kernelhub.all_reduce(overlapping[:4], group, out=out),
        "backend": lambda: kernelhub.all_reduce(ones(4), group, backend="triton.one_shot" if other else None),
        "run": lambda: plan.run(bad),
        "norm": lambda: kernelhub.all_reduce_rms_norm(*[ones(2, 8)] * 2, weight, -1.0 if other else 1e-5, group),
        "scatter": lambda: kernelhub.reduce_scatter(ones(4 if other else 3, 2), group),
        "gather": lambda: kernelhub.all_gather(ones(2, 2), group, rows=[2] if other else None),
        "tokens": lambda: kernelhub.moe_dispatch(**tokens | more),
        "exchange": lambda: exchange.run(**more),
        "combine": lambda: kernelhub.moe_combine(sent.x.double() if other else sent.x, sent.handle, group),
        "merge": lambda: merge.run(sent.x.double() if other else sent.x, sent.handle),
        "layer": lambda: kernelhub.expert_parallel_moe(**layer | ({"topk_weights": None} if other else {})),
        "everywhere": lambda: kernelhub.all_reduce(ones(4, dtype=torch.int64), group),
    }
    answers = {}
    for name, call in calls.items():
        try:
            answers[name] = attempt(lambda call=call: str(call()))
        except (InvalidArgument, NoKernel) as error:
            answers[name] = {"code": "refused", "message": str(error)}
        answers[name]["after"] = kernelhub.all_reduce(ones(3), group).tolist()
    return answers


def refused_compared(rank: int, size: int) -> dict[str, Any]:
    """The same, where KERNELHUB_CHECK=1 has the ranks compare calls through the store of the group."""
    with variables(KERNELHUB_CHECK="1"):
        return refused(rank, size)


def refused_alone(rank: int, size: int) -> dict[str, Any]:
    """Rank 1 calls and is refused, and no other rank calls."""
    if rank != 1:
        return {}
    begun = time.monotonic()
    with variables(KERNELHUB_COMM_TIMEOUT_S="2"):
        try:
            kernelhub.all_reduce(torch.ones(4, dtype=torch.int64), dist.group.WORLD)
        except InvalidArgument as error:
            return {"message": str(error), "elapsed_s": time.monotonic() - begun}
    return {"message": "no error"}
