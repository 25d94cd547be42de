"""What each rank does in the tests of collectives: one function for each scene."""

from __future__ import annotations

import itertools
import signal
from typing import Any

import pytest
import torch
from torch import distributed as dist

import kernelhub
from kernelhub.errors import InvalidArgument, NoKernel
from kernelhub.ops.case import bytes_of
from tests.runtime.world import attempt, end_this_process, variables

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QUANTISED: dict[str, dict[str, float]] = {
    "fp8_tensor": {"scale": 0.02},
    "fp8_token": {},
    "fp8_group": {},
    "mxfp8": {},
    "nvfp4": {"global_scale": 0.004},
}
PAIR = "comm_pairs.sum_then_quant"
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


def gathers(rank: int, size: int) -> list[str]:
    """The gathered rows that are wrong: of ranks with as many rows as others, with others, and with none."""
    wrong = []
    group = dist.group.WORLD
    for dtype, rows in itertools.product((*DTYPES, torch.int32), (None, [2, 0, 3], [0, 0, 0], [4, 4, 4])):
        counts = [3] * size if rows is None else rows
        parts = [integers(other, (count, 5), dtype) for other, count in enumerate(counts)]
        want, x = torch.cat(parts), parts[rank]
        wide = torch.full((counts[rank], 10), 99, dtype=dtype)
        wide[:, ::2] = x
        plan = kernelhub.all_gather.prepare(x, group, rows=rows)
        found = {
            "call": kernelhub.all_gather(x, group, rows=rows),
            "plan": plan.run(x, rows=rows),
            "strided": plan.run(wide[:, ::2], rows=rows),
            "out": plan.run(x, out=torch.full_like(want, 99), rows=rows),
            "strided out": plan.run(x, out=torch.full((len(want), 10), 99, dtype=dtype)[:, ::2], rows=rows),
            "reference": kernelhub.all_gather.reference(x, group, rows=rows),
        }
        wrong += [f"{name}: {dtype} {rows}" for name, got in found.items() if not torch.equal(got, want)]
    return wrong


def scatters(rank: int, size: int) -> list[str]:
    """The parts of sums that are wrong."""
    wrong = []
    group = dist.group.WORLD
    for dtype, rows in itertools.product(DTYPES, (0, 2)):
        parts = [integers(other, (rows * size, 5), dtype) for other in range(size)]
        want = torch.stack([part.float() for part in parts]).sum(0).to(dtype).tensor_split(size)[rank]
        plan = kernelhub.reduce_scatter.prepare(parts[rank], group)
        found = {
            "call": kernelhub.reduce_scatter(parts[rank], group),
            "plan": plan.run(parts[rank]),
            "out": plan.run(parts[rank], out=torch.full((5, rows), torch.nan, dtype=dtype).t()),
            "reference": kernelhub.reduce_scatter.reference(parts[rank], group).to(dtype),
        }
        wrong += [f"{name}: {dtype} {rows}" for name, got in found.items() if not torch.equal(got, want)]
    return wrong


def other_rows(rank: int, size: int) -> dict[str, Any]:
    rows = [1, 1, 1] if rank != 1 else [1, 1, 2]
    return attempt(lambda: kernelhub.all_gather.prepare(torch.ones(1, 3), dist.group.WORLD, rows=rows).kernel)


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


def quantised_norms(rank: int, size: int, kernel: str | None = None) -> list[str]:
    """The quantised sums that are wrong: they have the bits of `rms_norm_quant` of the sum, on every rank."""
    wrong = []
    group = dist.group.WORLD
    for (form, own), rows in itertools.product(QUANTISED.items(), (0, 3)):
        given = {name: torch.full((1,), value) for name, value in own.items()}
        x, residual = integers(rank, (rows, 64), torch.bfloat16), integers(99, (rows, 64), torch.bfloat16)
        weight = integers(98, (64,), torch.bfloat16)
        total = sum(integers(other, (rows, 64), torch.float32) for other in range(size)) + residual.float()
        total = total.to(x.dtype)
        want = (*kernelhub.rms_norm_quant(total, weight, 1e-5, format=form, **given, backend="torch.steps"), total)
        asked = {"format": form, **given, "backend": kernel}
        plan = kernelhub.all_reduce_rms_norm.prepare(x, residual, weight, 1e-5, group, **asked)
        found = {
            "call": kernelhub.all_reduce_rms_norm(x, residual, weight, 1e-5, group, **asked),
            "plan": plan.run(x, residual, weight, 1e-5, **given),
            "in place": plan.run(x.clone(), own_rows := residual.clone(), weight, 1e-5, residual_out=own_rows, **given),
        }
        wrong += [
            f"{name}: {form} {rows} rows"
            for name, results in found.items()
            if [bytes_of(one).tolist() for one in results] != [bytes_of(one).tolist() for one in want]
        ]
    return wrong


def quantised_pairs(rank: int, size: int) -> list[str]:
    """The same, by the sum and the norm one after the other."""
    return quantised_norms(rank, size, PAIR)


def pairs_alone(rank: int, size: int) -> dict[str, Any]:
    """The pair in a group of any size, also where ranks give a call something else; then it sums again."""
    x, weight, group = torch.ones(2, 64), torch.ones(64), dist.group.WORLD

    def norm(eps: float, format: str) -> float:
        total = kernelhub.all_reduce_rms_norm(x, x, weight, eps, group, format=format, backend=PAIR)[-1]
        return float(total.unique())

    return {
        "wrong": quantised_pairs(rank, size),
        "eps": attempt(lambda: norm(1e-5 * (1 + (rank == 1)), "fp8_token")),
        "format": attempt(lambda: norm(1e-5, "fp8_group" if rank == 1 else "fp8_token")),
        "again": attempt(lambda: norm(1e-5, "fp8_token")),
    }


def other_parts(rank: int, size: int) -> dict[str, Any]:
    """Rank 1 selects another kernel for a part, of the same pair."""
    x, weight = torch.ones(2, 64), torch.ones(64)
    with kernelhub.use(rms_norm_quant="triton" if rank == 1 else "torch"):
        prepare = kernelhub.all_reduce_rms_norm.prepare
        return attempt(lambda: prepare(x, x, weight, 1e-5, dist.group.WORLD, format="fp8_group", backend=PAIR).kernel)


def lacking_part(rank: int, size: int) -> dict[str, Any]:
    """Rank 1 has no kernel for a part."""
    x, weight = torch.ones(2, 64), torch.ones(64)
    with kernelhub.use(disable=("torch.steps", "triton.rows") if rank == 1 else ()):
        prepare = kernelhub.all_reduce_rms_norm.prepare
        try:
            return attempt(
                lambda: prepare(x, x, weight, 1e-5, dist.group.WORLD, format="fp8_group", backend=PAIR).kernel
            )
        except NoKernel as error:
            return {"lacks": str(error)}


def agreed_parts(rank: int, size: int) -> dict[str, Any]:
    """Ranks prepared the pair with other parts, each alone, and agree."""
    x, weight = torch.ones(2, 64), torch.ones(64)
    groups = [dist.new_group([one]) for one in range(size)]
    with kernelhub.use(prefer={"rms_norm_quant": "triton" if rank == 1 else "torch", "all_reduce_rms_norm": PAIR}):
        plan = kernelhub.all_reduce_rms_norm.prepare(x, x, weight, 1e-5, groups[rank], format="fp8_group")
    agreement = kernelhub.agree(what=plan)
    answer = {
        "had": [part.selected for part in plan.parts["any"]],
        "agreed": {choice.op: choice.kernel for choice in agreement.choices},
        "stale": len(agreement.stale),
        "run": attempt(lambda: bool(plan.run(x, x, weight, 1e-5))),
    }
    kernelhub.reload()
    return answer


def other_formats(rank: int, size: int) -> dict[str, Any]:
    x, weight = torch.ones(2, 64), torch.ones(64)
    form = "fp8_token" if rank == 1 else "fp8_group"
    prepare = kernelhub.all_reduce_rms_norm.prepare
    return attempt(lambda: prepare(x, x, weight, 1e-5, dist.group.WORLD, format=form).kernel)


def other_versions(rank: int, size: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(kernelhub, "__version__", "0.0.9")
        return attempt(lambda: kernelhub.all_reduce.prepare(torch.ones(2, 3), dist.group.WORLD).kernel)


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

    def calls(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part = kernelhub.reduce_scatter(x, name)
        out, total = kernelhub.all_reduce_rms_norm(x, x, x[0], 0.0, name)
        codes, scale, again = kernelhub.all_reduce_rms_norm(x, x, x[0], 0.0, name, format="fp8_token")
        back = kernelhub.dequantize_fp8(codes, scale, out_dtype=torch.float32)
        return kernelhub.all_reduce(x, name) * 2, kernelhub.all_gather(part, name), out, total, back, again

    run = torch.compile(calls, backend="eager", fullgraph=True)
    double, whole, out, total, back, again = run(torch.ones(size, 4))
    return all(
        torch.equal(found, torch.full((size, 4), value))
        for found, value in (
            (double, 2.0 * size),
            (whole, 1.0 * size),
            (out, 1.0),
            (total, 1.0 + size),
            (back, 1.0),
            (again, 1.0 + size),
        )
    )


def part_of_the_world(rank: int, size: int) -> dict[str, Any]:
    part = dist.new_group([0, 1])
    if rank < 2:
        return {"sum": kernelhub.all_reduce(torch.ones(1), part).item()}
    try:
        kernelhub.all_reduce(torch.ones(1), part)
    except InvalidArgument as error:
        return {"parameter": error.parameter, "message": str(error)}
    return {}


def part_with_other_shapes(rank: int, size: int) -> dict[str, Any]:
    part = dist.new_group([1, 2])
    if rank == 0:
        return {}
    return attempt(lambda: kernelhub.all_reduce.prepare(torch.ones(rank), part).kernel)


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


def late_rank(rank: int, size: int) -> list[dict[str, Any]]:
    """Rank 1 comes when the others have given up, rank 0 twice; then all call until it succeeds."""
    group, found = dist.group.WORLD, []
    store = dist.distributed_c10d._get_default_store()

    def prepare() -> bool:
        found.append(attempt(lambda: kernelhub.all_reduce.prepare(torch.ones(2), group).kernel))
        return "value" in found[-1]

    with variables(KERNELHUB_COMM_TIMEOUT_S="2"):
        kernelhub.reload()
        for _ in range((2, 0, 1)[rank]):
            prepare()
        store.set(f"gave up/{rank}", "")
        store.wait([f"gave up/{other}" for other in range(size)])
        while not prepare() and len(found) < 6:
            pass
    total = kernelhub.all_reduce(torch.ones(2), group).tolist()
    return [*found, {"total": total}]


def act(rank: int, size: int) -> dict[str, Any]:
    """All scenes that every rank survives, the one that ends the order of plans last."""
    scenes = (
        sums,
        norms,
        quantised_norms,
        quantised_pairs,
        other_parts,
        lacking_part,
        agreed_parts,
        gathers,
        scatters,
        other_rows,
        same_bits,
        selected,
        compiled,
        part_of_the_world,
        part_with_other_shapes,
        other_shapes,
        other_dtypes,
        other_formats,
        other_versions,
        bad_argument,
    )
    with variables(KERNELHUB_COMM_TIMEOUT_S="20"):
        kernelhub.reload()
        answers: dict[str, Any] = {scene.__name__: scene(rank, size) for scene in scenes}
    with variables(KERNELHUB_COMM_TIMEOUT_S=str(TIMEOUT_S)):
        kernelhub.reload()
        dist.barrier()
        answers["absent_rank"] = absent_rank(rank, size)
    return answers


def lost(rank: int, size: int) -> dict[str, Any]:
    """Rank 2 stops between two runs of a plan in a group of all, then rank 1 is killed in a group without it."""
    answers: dict[str, Any] = {}
    part = dist.new_group([0, 1])
    with variables(KERNELHUB_COMM_TIMEOUT_S=str(TIMEOUT_S)):
        plan = kernelhub.all_reduce.prepare(torch.ones(2), dist.group.WORLD)
        plan.run(torch.ones(2))
        later = kernelhub.all_reduce.prepare(torch.ones(2), part) if rank < 2 else None
        if rank == 2:
            end_this_process(signal.SIGSTOP)
        try:
            plan.run(torch.ones(2))
        except RuntimeError as error:
            answers["stopped"] = str(error)
        if rank == 1:
            end_this_process(signal.SIGKILL)
        try:
            later.run(torch.ones(2))
        except RuntimeError as error:
            answers["killed"] = str(error)
        return answers
