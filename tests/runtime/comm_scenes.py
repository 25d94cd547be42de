"""What each rank does in the tests of collectives: one function for each scene."""

from __future__ import annotations

import itertools
import signal
from typing import Any

import torch
from torch import distributed as dist

import kernelhub
from kernelhub.errors import InvalidArgument
from tests.runtime.world import attempt, end_this_process, variables

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((), (0,), (0, 8), (1,), (3, 5), (129, 64))
TIMEOUT_S = 4


def integers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small integers, whose sum is exact in every dtype and order."""
    random = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, shape, generator=random).to(dtype)


def sums(rank: int, size: int) -> list[str]:
    """The sums that are wrong."""
    wrong = []
    group = dist.group.WORLD
    for dtype in DTYPES:
        for shape in SHAPES:
            x = integers(rank, shape, dtype)
            want = sum(integers(other, shape, torch.float32) for other in range(size)).to(dtype)
            plan = kernelhub.all_reduce.prepare(x, group)
            kept = x.clone()
            found = {
                "call": kernelhub.all_reduce(x, group),
                "by name": kernelhub.all_reduce(x, group.group_name),
                "plan": plan.run(x),
                "out": kernelhub.all_reduce(x, group, out=torch.full_like(x, torch.nan)),
                "reference": kernelhub.all_reduce.reference(x, group).to(dtype),
                "operand": x - kept + want,
            }
            if x.ndim == 2:
                wide = torch.full((*shape, 2), torch.nan, dtype=dtype)
                wide[..., 0] = x
                found["strided"] = kernelhub.all_reduce(wide[..., 0], group)
                kernelhub.all_reduce(x, group, out=wide[..., 1])
                found["strided out"] = wide[..., 1]
                own = x.t().contiguous().t()
                found["strided in place"] = kernelhub.all_reduce(own, group, out=own)
            found["in place"] = kernelhub.all_reduce(x, group, out=x)
            wrong += [f"{name}: {dtype} {shape}" for name, got in found.items() if not torch.equal(got, want)]
    return wrong


def same_bits(rank: int, size: int) -> str:
    """Bits of a sum of fractions, which depends on the order."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(rank)).bfloat16()
    return bytes(kernelhub.all_reduce(x, dist.group.WORLD).view(torch.uint8).tolist()).hex()


def norms(rank: int, size: int) -> list[str]:
    """The normalised sums that are wrong: the sums are of integers, and exact."""
    wrong = []
    group = dist.group.WORLD
    for dtype, rows in itertools.product(DTYPES, (0, 5)):
        x, residual = integers(rank, (rows, 64), dtype), integers(99, (rows, 64), dtype)
        weight = integers(98, (64,), dtype)
        total = sum(integers(other, (rows, 64), torch.float32) for other in range(size)) + residual.float()
        want = (total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.float()).to(dtype)
        plan = kernelhub.all_reduce_rms_norm.prepare(x, residual, weight, 1e-5, group)
        found = {
            "call": kernelhub.all_reduce_rms_norm(x, residual, weight, 1e-5, group),
            "plan": plan.run(x, residual, weight, 1e-5),
            "in place": plan.run(x.clone(), own := residual.clone(), weight, 1e-5, residual_out=own),
        }
        for name, (out, residual_out) in found.items():
            right = torch.equal(residual_out, total.to(dtype)) and torch.allclose(out, want, rtol=1e-2, atol=1e-6)
            wrong += [] if right else [f"{name}: {dtype} {rows} rows"]
    return wrong


def selected(rank: int, size: int) -> dict[str, Any]:
    x = torch.ones(2, 3)
    explained = kernelhub.all_reduce.explain(x, dist.group.WORLD)
    plan = kernelhub.all_reduce.prepare(x, dist.group.WORLD)
    agreement = kernelhub.agree(what=plan)
    kernelhub.reload()
    return {
        "explained": explained.selected,
        "plan": plan.kernel,
        "agreed": [choice.kernel for choice in agreement.choices],
        "world_size": explained.problem.world_size,
        "ranks": size,
    }


def compiled(rank: int, size: int) -> bool:
    name = dist.group.WORLD.group_name
    run = torch.compile(lambda x: kernelhub.all_reduce(x, name) * 2, backend="eager", fullgraph=True)
    return torch.equal(run(torch.ones(3)), torch.full((3,), 2.0 * size))


def part_of_the_world(rank: int, size: int) -> dict[str, Any]:
    part = dist.new_group([0, 1])
    if rank < 2:
        return {"sum": kernelhub.all_reduce(torch.ones(1), part).item()}
    try:
        kernelhub.all_reduce(torch.ones(1), part)
    except InvalidArgument as error:
        return {"parameter": error.parameter, "message": str(error)}
    return {}


def other_shapes(rank: int, size: int) -> dict[str, Any]:
    return attempt(lambda: kernelhub.all_reduce.prepare(torch.ones(2, 3 + (rank == 1)), dist.group.WORLD).kernel)


def other_dtypes(rank: int, size: int) -> dict[str, Any]:
    x = torch.ones(2, dtype=torch.float16 if rank == 2 else torch.float32)
    return attempt(lambda: kernelhub.all_reduce.prepare(x, dist.group.WORLD).kernel)


def bad_argument(rank: int, size: int) -> dict[str, Any]:
    x = torch.ones(2, dtype=torch.int32 if rank == 1 else torch.float32)
    try:
        return attempt(lambda: kernelhub.all_reduce.prepare(x, dist.group.WORLD).kernel)
    except InvalidArgument as error:
        return {"parameter": error.parameter}


def absent_rank(rank: int, size: int) -> dict[str, Any]:
    if rank == 1:
        return {}
    return attempt(lambda: kernelhub.all_reduce.prepare(torch.ones(2), dist.group.WORLD).kernel)


def act(rank: int, size: int) -> dict[str, Any]:
    """All scenes that every rank survives, the one that ends the order of plans last."""
    scenes = (sums, norms, same_bits, selected, compiled, part_of_the_world, other_shapes, other_dtypes, bad_argument)
    with variables(KERNELHUB_COMM_TIMEOUT_S="20"):
        kernelhub.reload()
        answers: dict[str, Any] = {scene.__name__: scene(rank, size) for scene in scenes}
    with variables(KERNELHUB_COMM_TIMEOUT_S=str(TIMEOUT_S)):
        kernelhub.reload()
        dist.barrier()
        answers["absent_rank"] = absent_rank(rank, size)
    return answers


def killed(rank: int, size: int) -> dict[str, Any]:
    """A rank is killed between two runs of a plan."""
    with variables(KERNELHUB_COMM_TIMEOUT_S=str(TIMEOUT_S)):
        plan = kernelhub.all_reduce.prepare(torch.ones(2), dist.group.WORLD)
        plan.run(torch.ones(2))
        if rank == 1:
            end_this_process(signal.SIGKILL)
        try:
            plan.run(torch.ones(2))
        except RuntimeError as error:
            return {"message": str(error)}
        return {}
