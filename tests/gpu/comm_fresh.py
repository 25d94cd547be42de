"""Collectives without given results, which come from memory that is ready, on GPUs; a person runs it.

    python -m tests.gpu.comm_fresh --ranks 2

It starts the ranks and prints a JSON object: for each rank and collective what was wrong, and how many of the last
calls reached Python. Each result is compared, bit for bit, with that of a run into a place of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")

import torch
import torch.distributed as dist
from torch import Tensor

import kernelhub
from kernelhub.ops.comm.experts.received import Dispatched
from kernelhub.ops.comm.experts.results import outputs_of
from kernelhub.ops.known_calls import KnownCalls
from tests.gpu.comm_conformance import run_ranks, wait_for, write
from tests.runtime.world import _free_port

CALLS, OPERANDS = 60, 5
DEVICE = ["cuda"]  # or that of --device: a CPU has no streams and graphs
ROWS, HIDDEN, EXPERTS, TOP_K, MOST = 8, 2048, 16, 4, 16


class Collective(NamedTuple):
    """One collective, prepared.

    Attributes:
        operands: of each of some calls.
        run, direct: make a call of operands, without a given result.
        into: makes one into memory of its own.
    """

    operands: list[tuple[Any, ...]]
    run: Callable[..., Any]
    direct: Callable[..., Any]
    into: Callable[..., Any]


def collectives() -> Iterator[tuple[str, Callable[[], Collective]]]:
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        yield name, lambda name=name: of_rows(name)
    for form in (None, "fp8_group", "nvfp4"):
        yield f"all_reduce_rms_norm {form}", lambda form=form: of_norm(form)
    for format in ("tokens", "contiguous", "masked"):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            label = f"{format} {str(dtype)[6:]}"
            yield f"moe_dispatch {label}", lambda format=format, dtype=dtype: dispatched(format, dtype)
        yield f"moe_combine {format}", lambda format=format: combined(format)


def integers(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    chosen = torch.Generator(device=DEVICE[0]).manual_seed(1000 * seed + dist.get_rank())
    return torch.randint(-8, 9, shape, generator=chosen, device=DEVICE[0]).to(dtype)


def of_rows(name: str) -> Collective:
    function, group = getattr(kernelhub, name), dist.group.WORLD
    operands = [(integers((ROWS, HIDDEN), seed),) for seed in range(OPERANDS)]
    plan = function.prepare(*operands[0], group)
    like = plan.run(*operands[0])
    return Collective(
        operands, plan.run, lambda x: function(x, group), lambda x: plan.run(x, out=torch.empty_like(like))
    )


def of_norm(form: str | None) -> Collective:
    function, group = kernelhub.all_reduce_rms_norm, dist.group.WORLD
    given = {"global_scale": torch.ones(1, device=DEVICE[0])} if form == "nvfp4" else {}
    operands = [
        (*(integers((ROWS, HIDDEN), seed) for _ in range(2)), integers((HIDDEN,), 7), 1e-5) for seed in range(OPERANDS)
    ]
    plan = function.prepare(*operands[0], group, format=form, **given)
    names = ("out", "residual_out") if form is None else ("out", "out_scale", "residual_out")
    made = plan.run(*operands[0], **given)

    def into(*of: Any) -> Any:
        places = {name: torch.empty_like(one) for name, one in zip(names, made, strict=True)}
        return plan.run(*of, **given, **places)

    return Collective(
        operands,
        lambda *of: plan.run(*of, **given),
        lambda *of: function(*of, group, format=form, **given),
        into,
    )


def tokens(seed: int, dtype: torch.dtype) -> tuple[Any, ...]:
    chosen = torch.Generator(device=DEVICE[0]).manual_seed(1000 * seed + dist.get_rank())
    ids = torch.rand(MOST, EXPERTS, generator=chosen, device=DEVICE[0]).topk(TOP_K, 1).indices.int()
    scales = torch.ones(MOST, HIDDEN // 128, device=DEVICE[0]) if dtype is torch.float8_e4m3fn else None
    return (
        integers((MOST, HIDDEN), seed).to(dtype),
        ids,
        torch.rand(MOST, TOP_K, generator=chosen, device=DEVICE[0]),
        scales,
    )


def dispatched(format: str, dtype: torch.dtype) -> Collective:
    function = kernelhub.moe_dispatch
    operands = [tokens(seed, dtype) for seed in range(OPERANDS)]
    named = {"num_experts": EXPERTS, "format": format, "max_tokens": MOST, "group": dist.group.WORLD}
    x, ids, weights, scales = operands[0]
    plan = function.prepare(x, ids, weights, scales=scales, **named)
    return Collective(
        operands,
        plan.run,
        lambda x, ids, weights, scales: function(x, ids, weights, scales=scales, **named),
        lambda *of: plan.run(*of, out=plan.results()),
    )


def combined(format: str) -> Collective:
    function, group = kernelhub.moe_combine, dist.group.WORLD
    sent = dispatched(format, torch.bfloat16)
    operands = []
    for seed in range(OPERANDS):
        given = sent.run(*sent.operands[seed])
        operands.append((given.x.nan_to_num(0.0, 0.0, 0.0).clamp(-8, 8), given.handle))
    plan = function.prepare(*operands[0], group)
    like = plan.run(*operands[0])
    return Collective(
        operands,
        plan.run,
        lambda y, handle: function(y, handle, group),
        lambda y, handle: plan.run(y, handle, out=torch.empty_like(like)),
    )


def parts(result: Any) -> list[Tensor]:
    """What of a result is compared: rows of no expert hold anything."""
    if type(result) is not Dispatched:
        return list(result) if isinstance(result, tuple) else [result]
    x, counts = result.x, result.counts
    if result.topk_ids is not None:
        named = (result.topk_ids >= 0).any(1)
        return [x[named], counts, result.topk_ids, result.topk_weights[named]]
    if result.offsets is not None:
        return [x[: int(counts.sum())], counts, result.offsets, *outputs_of(result)[-2:]]
    named = torch.arange(x.shape[1], device=DEVICE[0]) < counts[:, None]
    return [x[named], counts, *outputs_of(result)[-2:]]


def alike(result: Any, wanted: list[Tensor]) -> bool:
    return all(same(one, other) for one, other in zip(parts(result), wanted, strict=True))


def same(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal, bit for bit: codes have no comparison."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def wrong_in(of: Collective) -> Iterator[str]:
    """What is wrong, and how many of the last calls reached Python."""
    wanted = [[one.clone() for one in parts(of.into(*given))] for given in of.operands]
    for way, call in (("run", of.run), ("call", of.direct)):
        for _ in range(40):
            call(*of.operands[0])
        with python_calls() as met:
            kept = [call(*of.operands[turn % OPERANDS]) for turn in range(CALLS)]
        yield f"{way}: {len(met)} of {CALLS} reached Python"
        yield from (f"{way}, call {turn}" for turn, got in enumerate(kept) if not alike(got, wanted[turn % OPERANDS]))
        if DEVICE == ["cuda"]:
            yield from (f"{way}, {one}" for one in on_streams(of, call, wanted))
            yield from (f"{way}, {one}" for one in in_graphs(of, call, wanted))
        yield from (f"{way}, kept {turn}" for turn, got in enumerate(kept) if not alike(got, wanted[turn % OPERANDS]))


def on_streams(of: Collective, call: Callable[..., Any], wanted: list[list[Tensor]]) -> Iterator[str]:
    """Calls on two streams in turn, whose results a third one reads late, after they are dropped."""
    torch.cuda.synchronize()
    streams, reader = [torch.cuda.Stream() for _ in range(2)], torch.cuda.Stream()
    found = []
    for turn in range(CALLS):
        stream = streams[turn % 2]
        stream.wait_stream(streams[(turn + 1) % 2])
        with torch.cuda.stream(stream):
            got = call(*of.operands[turn % OPERANDS])
        tensors = outputs_of(got) if type(got) is Dispatched else parts(got)
        reader.wait_stream(stream)
        with torch.cuda.stream(reader):
            torch.cuda._sleep(20_000)
            copies = [one.clone() for one in tensors]
        for one in tensors:
            one.record_stream(reader)
        of_experts = type(got) is Dispatched  # of which some rows hold anything
        found.append((got if of_experts and turn % 3 else None, None if of_experts else copies))
        del got, tensors
    torch.cuda.synchronize()
    for turn, (kept, copied) in enumerate(found):
        want = wanted[turn % OPERANDS]
        if kept is not None and not alike(kept, want):
            yield f"streams, kept {turn}"
        if copied is not None and not all(same(one, other) for one, other in zip(copied, want, strict=True)):
            yield f"streams, call {turn}"


def in_graphs(of: Collective, call: Callable[..., Any], wanted: list[list[Tensor]]) -> Iterator[str]:
    """Captured calls, with eager ones between their replays."""
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = [call(*given) for given in of.operands[:3]]
    for _ in range(4):
        graph.replay()
        kept = [call(*of.operands[turn % OPERANDS]) for turn in range(20)]
        torch.cuda.synchronize()
        yield from (f"graph, replayed {at}" for at, got in enumerate(captured) if not alike(got, wanted[at]))
        yield from (f"graph, eager {turn}" for turn, got in enumerate(kept) if not alike(got, wanted[turn % OPERANDS]))


@contextlib.contextmanager
def python_calls() -> Iterator[list[int]]:
    """The known calls that Python, not the extension, launched in the block."""
    met: list[int] = []
    launches = KnownCalls.launches
    KnownCalls.launches = lambda *given: (met.append(0), launches(*given))[1]  # type: ignore[method-assign]
    try:
        yield met
    finally:
        KnownCalls.launches = launches  # type: ignore[method-assign]


def live(
    rank: int, ranks: int, port: int, folder: str, limit_s: float, after: Path | None, only: list[str], device: str
) -> None:
    """One rank; it writes its answers and ends."""
    DEVICE[:] = [device]
    if device == "cuda":
        torch.cuda.set_device(rank)
    address, backend = f"tcp://127.0.0.1:{port}", "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    torch.zeros(1, device=device)
    wait_for(after)
    faulthandler.dump_traceback_later(max(1.0, limit_s - 3.0))
    answers: dict[str, Any] = {}
    for name, made in collectives():
        if only and name.partition(" ")[0] not in only:
            continue
        began = time.monotonic()
        write(Path(folder, str(rank)), {**answers, "at": name})
        found = [*wrong_in(made())]
        answers[name] = {
            "python": [one for one in found if "reached" in one],
            "wrong": [one for one in found if "reached" not in one][:8],
            "s": round(time.monotonic() - began, 1),
        }
        write(Path(folder, str(rank)), answers)
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", default=[], help="ops")
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument("--after", type=Path, help="begin once there is this file; the limit counts from then")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = (options.ranks, _free_port(), folder, options.limit_s, options.after, options.only, options.device)

        def show(ended: list[int | None]) -> None:
            files = [Path(folder, str(rank)) for rank in range(options.ranks)]
            answers = [json.loads(file.read_text()) if file.exists() else None for file in files]
            print(json.dumps({"ended": ended, "ranks": answers}), flush=True)

        run_ranks(live, given, options.ranks, options.limit_s, options.after, show)


if __name__ == "__main__":
    main()
