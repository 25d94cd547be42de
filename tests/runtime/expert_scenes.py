"""What each rank does in the tests of expert parallelism: one function for each scene."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

import kernelhub
from kernelhub.errors import InvalidArgument, NoKernel
from kernelhub.ops.comm.experts.cases import by_expert
from kernelhub.ops.comm.experts.problem import FORMATS, TOKENS
from kernelhub.ops.comm.experts.received import Dispatched
from kernelhub.ops.models.shapes import MoeModel
from kernelhub.ops.moe.experts.tolerance import compare
from kernelhub.ops.moe.parallel.inputs import parallel_inputs
from kernelhub.ops.moe.parallel.reference import whole_layer
from tests.runtime.world import attempt, end_this_process, variables

TIMEOUT_S = 4
LAYER = MoeModel("small", num_experts=4, top_k=2, hidden_size=128, intermediate_size=128)
EXPERTS = 12
MOST = 9
LENGTHS = (5, 0, 9)  # of each rank's tokens
KERNELS = {
    None: (("torch.gather", "torch.all_to_all"), ("torch.reduce_scatter", "torch.all_to_all")),
    MOST: (
        ("torch.gather_fixed", "torch.all_to_all_fixed"),
        ("torch.reduce_scatter_fixed", "torch.all_to_all_fixed"),
    ),
}


def tokens_of(
    rank: int, routing: str, top_k: int = 3, dtype: torch.dtype = torch.bfloat16, width: int = 130
) -> dict[str, Any]:
    """Small integers, and weights of 1/2 and 1, whose sums are exact in every dtype and order."""
    random = torch.Generator().manual_seed(17 * rank + top_k)
    count = LENGTHS[rank % len(LENGTHS)]
    x = torch.randint(-4, 5, (count, width), generator=random).float()
    ids = torch.rand(count, EXPERTS, generator=random).topk(top_k, 1).indices.int()
    if routing == "all to one":
        ids = torch.full_like(ids, 4)
    elif routing == "to one rank":
        ids %= 4
    elif routing == "none":
        ids = torch.full_like(ids, -1)
    elif routing == "some twice, some none":
        ids[:, -1] = ids[:, 0]
        ids[::2, 0] = torch.tensor([-1, EXPERTS, 2**31 - 1, -(2**31), -7], dtype=torch.int32)[: len(ids[::2])]
    weights = torch.randint(1, 3, ids.shape, generator=random).float() / 2
    weights = weights.masked_fill((ids < 0) | (ids >= EXPERTS), torch.nan)
    made = {"x": x.to(dtype), "topk_ids": ids, "topk_weights": weights}
    if dtype is torch.float8_e4m3fn:
        made["scales"] = torch.randint(-1, 2, (count, -(-width // 128)), generator=random).float().exp2()
    return made


def expert(rows: Tensor, number: int) -> Tensor:
    """An expert whose results are exact."""
    return rows * (number % 3 + 1) - number % 2


def own(given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """The result for a rank's tokens, without a dispatch."""
    x, total = values(given["x"], given.get("scales")), torch.zeros(given["x"].shape)
    for row, (ids, weights) in enumerate(zip(given["topk_ids"].tolist(), given["topk_weights"].tolist(), strict=True)):
        for number, weight in zip(ids, weights, strict=True):
            if 0 <= number < EXPERTS:
                total[row] += weight * expert(x[row], number)
    return total.to(dtype)


def values(x: Tensor, scales: Tensor | None) -> Tensor:
    return x.float() if scales is None else x.float() * scales.repeat_interleave(128, -1)[..., : x.shape[-1]]


def wanted_by_expert(
    rank: int, size: int, format: str, parts: list[dict[str, Tensor]], experts: int = EXPERTS
) -> dict[str, Tensor]:
    """`by_expert` of what a rank gets, from its definition."""
    local = experts // size
    rows, weights, scales, counts = [], [], [], [0] * local
    for expert in range(local):
        for part in parts:
            for token, ids in enumerate(part["topk_ids"].tolist()):
                places = [place for place, number in enumerate(ids) if number == rank * local + expert]
                of_token = part["topk_weights"][token, places]
                shown = of_token if format == TOKENS else of_token.sum(0, keepdim=True)[: len(places)]
                counts[expert] += len(shown)
                weights += shown.tolist()
                rows += [part["x"][token].view(torch.uint8)] * len(shown)
                scales += [part["scales"][token] for _ in shown] if "scales" in part else []
    width = parts[0]["x"].shape[1] * parts[0]["x"].itemsize
    made = {
        "rows": torch.stack(rows) if rows else torch.empty((0, width), dtype=torch.uint8),
        "weights": torch.tensor(weights, dtype=torch.float32),
        "counts": torch.tensor(counts, dtype=torch.int32),
    }
    if "scales" in parts[0]:
        made["scales"] = torch.stack(scales) if scales else torch.empty((0, parts[0]["scales"].shape[1]))
    return made


def results(sent: Dispatched, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """What this rank's experts give for what it received, NaN in every row that belongs to none."""
    x, first = values(sent.x, sent.scales), rank * EXPERTS // size
    y = torch.full(x.shape, torch.nan)
    if sent.format == TOKENS:
        for row, (ids, weights) in enumerate(zip(sent.topk_ids.tolist(), sent.topk_weights.tolist(), strict=True)):
            chosen = [(number, weight) for number, weight in zip(ids, weights, strict=True) if number >= 0]
            if chosen:
                y[row] = sum(weight * expert(x[row], first + number) for number, weight in chosen)
        return y.to(dtype)
    ends = sent.counts.cumsum(0).tolist()
    for number, count in enumerate(sent.counts.tolist()):
        place: Any = (number, slice(count)) if sent.offsets is None else slice(ends[number] - count, ends[number])
        y[place] = expert(x[place], first + number)
    return y.to(dtype)


def ways() -> Iterator[tuple[int | None, str, str, torch.dtype]]:
    for most in KERNELS:
        for format in FORMATS:
            yield most, format, "some twice, some none", torch.bfloat16
            yield most, format, "random", torch.float8_e4m3fn
        for format, routing in zip(FORMATS, ("to one rank", "all to one", "none"), strict=True):
            yield most, format, routing, torch.float32
        yield most, FORMATS[2], "none", torch.float8_e4m3fn


def exchanges(rank: int, size: int) -> list[str]:
    """The dispatches and combines that are wrong."""
    wrong, group = [], dist.group.WORLD
    for most, format, routing, dtype in ways():
        given = tokens_of(rank, routing, dtype=dtype)
        options = {"group": group, "num_experts": EXPERTS, "format": format, "max_tokens": most}
        expected = by_expert(kernelhub.moe_dispatch.reference(**given, **options))
        of_y = torch.float32 if dtype is torch.float32 else torch.bfloat16
        want = own(given, of_y)
        for kernel in KERNELS[most][0]:
            sent = kernelhub.moe_dispatch(**given, **options, backend=kernel)
            got = by_expert(sent)
            label = f"{kernel} {format} {routing} {dtype}"
            wrong += [f"{label}: {name}" for name in expected if not same(got[name], expected[name])]
            y = results(sent, rank, size, of_y)
            if not torch.equal(kernelhub.moe_combine.reference(y, sent.handle, group).to(of_y), want):
                wrong.append(f"{label}: reference of combine")
            for other in KERNELS[most][1]:
                try:
                    out = kernelhub.moe_combine(y, sent.handle, group, backend=other)
                except NoKernel:
                    if (kernel, other) != ("torch.all_to_all", "torch.reduce_scatter"):
                        wrong.append(f"{label}: {other} does not combine it")
                    continue
                if not torch.equal(out, want):
                    wrong.append(f"{label}: {other}")
    return wrong


def top_ks(rank: int, size: int) -> list[str]:
    """Numbers of choices with a wrong result, through plans and strided operands."""
    wrong, group = [], dist.group.WORLD
    for top_k in range(1, 9):
        given = tokens_of(rank, "random", top_k)
        given = {name: torch.stack([part, part], 2)[..., 0] for name, part in given.items()}
        options = {"num_experts": EXPERTS, "format": FORMATS[top_k % 3], "max_tokens": None if top_k % 2 else MOST}
        plan = kernelhub.moe_dispatch.prepare(**given, **options, group=group.group_name)
        sent = plan.run(**given)
        y = results(sent, rank, size, torch.float16)
        combine = kernelhub.moe_combine.prepare(y, sent.handle, group)
        wide = torch.full((len(given["x"]), 130, 2), torch.nan, dtype=torch.float16)
        combine.run(torch.stack([y, y], -1)[..., 0], sent.handle, out=wide[..., 1])
        if not torch.equal(wide[..., 1], own(given, torch.float16)):
            wrong.append(f"top {top_k}")
    return wrong


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def layers(rank: int, size: int) -> dict[str, float]:
    """Error over tolerance of an expert-parallel layer against the experts of one process."""
    random = torch.Generator().manual_seed(3)
    w13 = torch.randn(EXPERTS, 64, 32, generator=random) / 6
    w2 = torch.randn(EXPERTS, 32, 32, generator=random) / 6
    mine = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
    random.manual_seed(rank)
    x = torch.randn(LENGTHS[rank % 3], 32, generator=random)
    weights, ids = kernelhub.route_experts(torch.randn(len(x), EXPERTS, generator=random), 4, renormalize=True)
    group, ratios = dist.group.WORLD, {}
    whole = {"x": x, "w13": w13, "w2": w2, "topk_weights": weights, "topk_ids": ids}
    for format in FORMATS:
        for most in KERNELS:
            sent = kernelhub.moe_dispatch(x, ids, weights, group, EXPERTS, format=format, max_tokens=most)
            if format == TOKENS:
                y = kernelhub.fused_moe(sent.x, w13[mine], w2[mine], sent.topk_weights, sent.topk_ids)
            else:
                lengths = {"group_sizes": sent.counts} if sent.offsets is None else {"offsets": sent.offsets}
                gate, up = kernelhub.grouped_gemm(sent.x, w13[mine], **lengths).chunk(2, -1)
                y = kernelhub.grouped_gemm(torch.nn.functional.silu(gate) * up, w2[mine], **lengths)
            ratios[f"{format} {most}"] = compare(kernelhub.moe_combine(y, sent.handle, group), whole).ratio
    return ratios


def parallel(rank: int, size: int) -> dict[str, Any]:
    """Error over tolerance of each pair against the experts of one process, and the steps of its plan."""
    made = {}
    pairs = [name for name in kernelhub.expert_parallel_moe.kernels() if not name.startswith("unsupported.")]
    for kernel in pairs:
        for most in KERNELS:
            given = parallel_inputs(
                model=LAYER,
                weights="fp8_block" if kernel.endswith("fp8") else "plain",
                activation_dtype="fp8_block" if kernel.endswith("fp8") else None,
                num_experts=EXPERTS // size,
                tokens=LENGTHS[rank],
                max_tokens=most,
                group=dist.group.WORLD,
                seed=rank,
            )
            random = torch.Generator().manual_seed(rank)
            given["topk_ids"] = torch.rand(LENGTHS[rank], EXPERTS, generator=random).topk(2, 1).indices.int()
            given["topk_ids"][:1, 1] = -1
            plan = kernelhub.expert_parallel_moe.prepare(**given, backend=kernel)
            options = ("group", "activation", "activation_dtype", "max_tokens")
            out = plan.run(**{name: value for name, value in given.items() if name not in options})
            whole = whole_layer(**{name: value for name, value in given.items() if name != "max_tokens"})
            again = kernelhub.expert_parallel_moe(**given, backend=kernel)
            label = f"{kernel}, {most}"
            made[label] = {"ratio": compare(out, whole).ratio, "again": torch.equal(out, again)}
            made[label]["steps"] = [part.step for part in plan.parts]
    return made


def selected(rank: int, size: int) -> dict[str, Any]:
    given = tokens_of(rank, "random")
    plan = kernelhub.moe_dispatch.prepare(**given, group=dist.group.WORLD, num_experts=EXPERTS, max_tokens=MOST)
    sent = plan.run(**given)
    combine = kernelhub.moe_combine.prepare(sent.x, sent.handle, dist.group.WORLD)
    agreement = kernelhub.agree(what=plan)
    kernelhub.reload()
    return {
        "explained": kernelhub.moe_combine.explain(sent.x, sent.handle, dist.group.WORLD).selected,
        "kernels": [plan.kernel, combine.kernel],
        "agreed": [choice.kernel for choice in agreement.choices],
    }


def _prepared(rank: int, **changes: Any) -> dict[str, Any]:
    given = tokens_of(rank, "random") | {"num_experts": EXPERTS, "max_tokens": MOST} | changes
    try:
        return attempt(lambda: kernelhub.moe_dispatch.prepare(**given, group=dist.group.WORLD).kernel)
    except InvalidArgument as error:
        return {"parameter": error.parameter, "message": str(error)}


def other_formats(rank: int, size: int) -> dict[str, Any]:
    return _prepared(rank, format=FORMATS[rank == 1])


def other_room(rank: int, size: int) -> dict[str, Any]:
    return _prepared(rank, max_tokens=MOST + (rank == 2))


def other_experts(rank: int, size: int) -> dict[str, Any]:
    return _prepared(rank, num_experts=EXPERTS + 3 * (rank == 1))


def too_many_tokens(rank: int, size: int) -> dict[str, Any]:
    return _prepared(rank, max_tokens=MOST - 1)


def other_results(rank: int, size: int) -> dict[str, Any]:
    sent = kernelhub.moe_dispatch(**tokens_of(rank, "random"), group=dist.group.WORLD, num_experts=EXPERTS)
    y = sent.x.to(torch.float16 if rank == 2 else torch.bfloat16)
    return attempt(lambda: kernelhub.moe_combine.prepare(y, sent.handle, dist.group.WORLD).kernel)


def absent_rank(rank: int, size: int) -> dict[str, Any]:
    return {} if rank == 1 else _prepared(rank)


def act(rank: int, size: int) -> dict[str, Any]:
    """All scenes, with the answers of all ranks; then a rank is killed between two runs of a plan."""
    scenes = (exchanges, top_ks, layers, parallel, selected, other_formats, other_room, other_experts)
    with variables(KERNELHUB_COMM_TIMEOUT_S="20"):
        kernelhub.reload()
        answers: dict[str, Any] = {scene.__name__: scene(rank, size) for scene in scenes}
        answers |= {scene.__name__: scene(rank, size) for scene in (too_many_tokens, other_results)}
    with variables(KERNELHUB_COMM_TIMEOUT_S=str(TIMEOUT_S)):
        kernelhub.reload()
        given = tokens_of(rank, "random")
        plan = kernelhub.moe_dispatch.prepare(**given, group=dist.group.WORLD, num_experts=EXPERTS)
        plan.run(**given)
        answers["absent_rank"] = absent_rank(rank, size)  # after which ranks are not in the same turn
        all_answers: list[Any] = [None] * size
        dist.all_gather_object(all_answers, answers)
        return {"scenes": all_answers, "killed": killed(plan, given, rank)}


def killed(plan: Any, given: dict[str, Any], rank: int) -> str:
    if rank == 1:
        end_this_process(signal.SIGKILL)
    try:
        plan.run(**given)
    except RuntimeError as error:
        return str(error)
    return ""


def later_group(rank: int, size: int) -> list[Any]:
    """A layer of ranks 0 and 1, then, after all groups were destroyed, of ranks 0 and 2 in a group of the same name."""
    store, found = c10d._get_default_store(), []
    for turn, members in enumerate(((0, 1), (0, 2))):
        if turn:
            dist.destroy_process_group()
            later = dist.PrefixStore("later", store)
            dist.init_process_group("gloo", store=later, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        group = dist.new_group(members)
        if rank in members:
            given = parallel_inputs(
                model=LAYER, num_experts=EXPERTS // 2, tokens=LENGTHS[rank], max_tokens=MOST, group=group, seed=rank
            )
            if not turn:
                kernelhub.expert_parallel_moe.prepare(**given)
            out = kernelhub.expert_parallel_moe(**given)
            whole = whole_layer(**{name: value for name, value in given.items() if name != "max_tokens"})
            found.append([group.group_name, compare(out, whole).ratio])
        dist.barrier()
    return found


def stopped(rank: int, size: int) -> dict[str, str]:
    """The last rank stops between a dispatch and its combine."""
    with variables(KERNELHUB_COMM_TIMEOUT_S=str(TIMEOUT_S)):
        kernelhub.reload()
        given, group = tokens_of(rank, "random"), dist.group.WORLD
        plan = kernelhub.moe_dispatch.prepare(**given, group=group, num_experts=EXPERTS, max_tokens=MOST)
        sent = plan.run(**given)
        combine = kernelhub.moe_combine.prepare(sent.x, sent.handle, group)
        combine.run(sent.x, sent.handle)
        if rank == size - 1:
            end_this_process(signal.SIGSTOP)
        try:
            combine.run(sent.x, sent.handle)
        except RuntimeError as error:
            return {"message": str(error)}
        return {}
