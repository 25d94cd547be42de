"""Norms of sums over ranks beside the sum alone, by kernel and form of launch, width and rows, in CUDA graphs.

    python benchmarks/comm_norms.py --ranks 2 --widths 7168 4096 --rows 1 16 64 --json norms.json
    python benchmarks/comm_norms.py --ranks 4 --format fp8_group nvfp4 [--prepare]

bfloat16. First each form is checked with operands that change, ranks that come late in turn, and replays of its graph:
`wrong` counts the results that are not those of the kernel that is selected, of integers whose sums are exact,
`unequal_bits` the bytes of each result that differ from its results of random numbers. Then come microseconds of a
call in a graph of 20, the slowest rank's, of all forms in turn, some passes: `graph_us`. `ratio` is the median over
that of the sum alone, `ratio_alike` of launches that begin early over that of sums that do so, too.

`--set early` takes forms that begin early, and clusters of other sizes. Of `--between-rows` graphs are measured, too,
with a kernel of torch before each call, as in a model: `between_us`, with its time. `--compile` compiles what the
forms and the conformance launch, by so many processes and without a GPU, into Triton's cache.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import random
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")

import torch
import torch.distributed as dist
import triton
from comm import GRAPH_CALLS, Bench, about
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

import kernelhub
from kernelhub.backends.shared.slot_memory import MOST_PROGRAMS, MOST_RANKS
from kernelhub.backends.triton.comm import adapter as adapters
from kernelhub.backends.triton.comm import connection
from kernelhub.backends.triton.launch import Launcher
from kernelhub.dispatch.hub import HUB
from kernelhub.ops.comm.problem import ATOMICS, MESSAGE_BYTES, NVLINK, AllReduceProblem, AllReduceRmsNormProblem
from kernelhub.ops.fused_quant.inputs import form_of
from kernelhub.probes.device import facts_of, simulated

WIDTHS, ROWS, FEW_ROWS = (7168, 4096, 8192), (1, 2, 4, 8, 16, 18, 36, 72, 73, 128), (1, 8, 32, 64, 128)
EPS, TIMEOUT_S = 1e-5, 20.0
SELECTED, ALONE = "selected", "the sum alone"
_CLUSTERED = "triton.one_shot_clustered"
Call = Callable[[], Any]


class Operands:
    """Of one call; `fill` gives them values that depend on a seed, x on the rank, too."""

    def __init__(self, rows: int, width: int, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.x, self.residual = (torch.empty(rows, width, dtype=torch.bfloat16, device=device) for _ in range(2))
        self.weight = torch.ones(width, dtype=torch.bfloat16, device=device)
        self.fill(0)

    def fill(self, seed: int, fractions: bool = False) -> None:
        for place, of in ((self.x, self.rank), (self.residual, 98), (self.weight, 99)):
            chosen = torch.Generator(device=place.device).manual_seed(100 * seed + of)
            if fractions:
                place.normal_(generator=chosen)
            else:
                place.copy_(torch.randint(-8, 9, place.shape, generator=chosen, device=place.device))


def by_plan(kernel: str | None, format: str | None, in_place: bool = False) -> Any:
    """A form that a request, or nothing, selects."""

    def made(given: Operands, group: Any) -> Call | None:
        form = form_of(format, given.x.device)
        x, residual, weight = given.x, given.residual, given.weight
        backend = None if kernel is None else [kernel, "torch.distributed"]
        plan = kernelhub.all_reduce_rms_norm.prepare(x, residual, weight, EPS, group, **form, backend=backend)
        if kernel not in (None, plan.kernel):
            return None  # not for this size
        scales = {name: value for name, value in form.items() if name != "format"}
        places = {"residual_out": residual if in_place else torch.empty_like(x)}
        if format is None:
            places["out"] = x if in_place else torch.empty_like(x)
        return lambda: plan.run(x, residual, weight, EPS, **places, **scales)

    return made


def by_adapter(
    kind: type, parts: int | None = None, warps: int | None = None, whole: bool = False, registers: int | None = None
) -> Any:
    """A form that no record has: other programs of a row, other warps, or the whole bucket in one launch."""

    class Launched(kind):  # type: ignore[misc]
        def __init__(self, problem: Any) -> None:
            tile = adapters.row_tile
            if warps is not None:
                adapters.row_tile = lambda *sizes: tile(*sizes)._replace(warps=warps)
            try:
                super().__init__(problem)
            finally:
                adapters.row_tile = tile
            self.registers = self.registers if registers is None else registers

        def split(self) -> int:
            return super().split() if parts is None else parts

        def rows_of_launch(self, row_bytes: int) -> int:
            return max(8, self.piece() // row_bytes) if whole else super().rows_of_launch(row_bytes)

    return launched(Launched)


def kind_of(base: type, parts: int | None = None, **attributes: Any) -> type:
    """An adapter with other attributes, and so many programs of a row."""
    if parts is not None:
        attributes["split"] = lambda self: parts
    return type("Launched", (base,), attributes)


class SumInClusters(adapters.OneShot):
    """The sum alone, launched in clusters that have no use: what such a launch takes."""

    programs = 1

    def sizes(self, num_bytes: int) -> tuple[int, tuple[int, ...]]:
        programs, others = super().sizes(num_bytes)
        return -(-programs // self.programs) * self.programs, others

    def attach(self, group_name: str, workspace: Any) -> Any:
        made = super().attach(group_name, workspace)
        made._launch._cluster = self.programs
        made._launch._ready.clear()
        example = torch.empty(16, dtype=self._dtype, device=workspace.device)
        made.compile((example, example), self.sizes(example.nbytes)[1])
        return made


@functools.cache
def early_kinds(width: int) -> dict[str, type]:
    """Adapters by form: launches that begin early, the sum's, too, and clusters of other sizes."""
    norms = {"one_shot": adapters.OneShotRmsNorm, "polled": adapters.PolledRmsNorm}
    found: dict[str, type] = {}
    for early in (1, 2):
        found[f"{ALONE}, early {early}"] = kind_of(adapters.OneShot, early=early)
        found[f"clustered, early {early}"] = kind_of(adapters.ClusteredRmsNorm, early=early)
        found |= {f"{name}, early {early}": kind_of(kind, early=early) for name, kind in norms.items()}
    found["clustered, early 1, eager"] = kind_of(adapters.ClusteredRmsNorm, early=1, eager=True)
    found["clustered, 32 B of a thread"] = kind_of(adapters.ClusteredRmsNorm, units=2)
    found["clustered, 32 B of a thread, early 1"] = kind_of(adapters.ClusteredRmsNorm, units=2, early=1)
    if width == 4096:
        found["clustered, 1 KB of a program"] = kind_of(adapters.ClusteredRmsNorm, least_part=1024)
        found["clustered, 1 KB of a program, early 1"] = kind_of(adapters.ClusteredRmsNorm, least_part=1024, early=1)
    elif width > 4096:
        for early in (0, 1):
            name = "one_shot, 8 parts" + ", early 1" * early
            found[name] = kind_of(adapters.OneShotRmsNorm, parts=8, early=early)
    programs = -(-width * 2 // 2048)
    found[f"{ALONE}, in clusters of {min(8, programs)}"] = kind_of(SumInClusters, programs=min(8, programs))
    return found


connected: dict[Any, Any] = {}


def launched(kind: type) -> Any:
    """A form by an adapter that no record has, one of all messages of a size."""

    def made(given: Operands, group: Any) -> Call | None:
        x, residual, weight = given.x, given.residual, given.weight
        adapter = adapter_of(kind, x.nbytes, x.shape[1], group.size(), facts_of(x.device.index))
        if adapter is None:
            return None
        key = (kind, adapter.problem)
        if key not in connected:
            adapter.connect(x, group, TIMEOUT_S)
        adapter = connected.setdefault(key, adapter)
        out, added = torch.empty_like(x), torch.empty_like(x)
        if issubclass(kind, adapters.OneShot):

            def total() -> tuple[torch.Tensor, ...]:
                adapter.launch(x, out, group, TIMEOUT_S)
                return (out,)

            return total

        def call() -> tuple[torch.Tensor, ...]:
            adapter.launch(x, residual, weight, EPS, out, added, group, TIMEOUT_S)
            return out, added

        return call

    return made


def adapter_of(
    kind: type, num_bytes: int, width: int, world_size: int, device: Any, dtype: str = "bfloat16"
) -> Any | None:
    """The adapter of a message; None if it has none of the size."""
    message = next((name for name, most in MESSAGE_BYTES.items() if num_bytes <= most), None)
    if message not in ("32KB", "256KB", "1MB"):
        return None
    facets = {"device": device, "link": NVLINK, "peers": ATOMICS, "message": message, "dtype": dtype}
    if issubclass(kind, adapters.OneShot):
        return kind(AllReduceProblem(**facets, world_size=world_size))
    facets |= {"weight_dtype": dtype, "hidden_size": width}
    made = kind(AllReduceRmsNormProblem(**facets, world_size=world_size))
    of_row = getattr(made, "_split", 1)
    # Programs that wait for others of their row have to be resident, and kernels begin early by the slots of turns.
    fits = of_row * made._rows <= adapters._TWO_EACH and (made.turns or not made.early or hasattr(made, "cluster"))
    return made if fits else None


def apart(kernel: str | None, format: str | None) -> Any:
    """The sum, then the norm of another op."""

    def made(given: Operands, group: Any) -> Call | None:
        form = form_of(format, given.x.device)
        x, residual, weight = given.x, given.residual, given.weight
        total = kernelhub.all_reduce.prepare(x, group, backend=kernel)
        norm = kernelhub.rms_norm_quant.prepare(x, weight, EPS, residual, **form)
        out, added = torch.empty_like(x), torch.empty_like(x)
        scales = {name: value for name, value in form.items() if name != "format"}
        return lambda: norm.run(total.run(x, out=out), weight, EPS, residual, **scales, out_residual=added)

    return made


def alone(given: Operands, group: Any) -> Call:
    plan, out = kernelhub.all_reduce.prepare(given.x, group), torch.empty_like(given.x)
    return lambda: plan.run(given.x, out=out)


def forms(
    format: str | None, ranks: int, width: int, only: list[str], without: list[str], chosen_set: str | None = None
) -> dict[str, Any]:
    """Those of a set that have one of `only` in their names, and none of `without`."""
    found = {ALONE: alone, SELECTED: by_plan(None, format)}
    if chosen_set == "early":
        found |= {_CLUSTERED: by_plan(_CLUSTERED, None)}
        found |= {f"{_CLUSTERED}, in place": by_plan(_CLUSTERED, None, True)}
        found |= {f"{SELECTED}, in place": by_plan(None, None, True)}
        found |= {name: launched(kind) for name, kind in early_kinds(width).items()}
    elif format is None:
        found |= {name: by_plan(name, None) for name in (_CLUSTERED, "triton.one_shot_polled", "triton.two_shot")}
        found["selected, in place"] = by_plan(None, None, True)
        if ranks == 2:
            found[f"{_CLUSTERED}, in place"] = by_plan(_CLUSTERED, None, True)
            found["clustered, 4 KB of a program"] = launched(kind_of(adapters.ClusteredRmsNorm, least_part=4096))
            found["clustered, launched early"] = launched(kind_of(adapters.ClusteredRmsNorm, early=1))
            found["triton.one_shot_polled, in place"] = by_plan("triton.one_shot_polled", None, True)
            today, polled = adapters.OneShotRmsNorm, adapters.PolledRmsNorm
            found["one_shot, a bucket in one launch"] = by_adapter(today, whole=True)
            if width > 4096:
                for parts, warps in ((4, 16), (8, 8)):
                    found[f"one_shot, {parts} parts, {warps} warps"] = by_adapter(today, parts, warps)
            if width == 7168:
                for parts, warps in ((8, 8), (4, 16), (2, 8), (1, 8)):
                    found[f"polled, {parts} parts, {warps} warps"] = by_adapter(polled, parts, warps)
                for parts, warps in ((8, 4), (4, 8)):
                    name = f"polled, {parts} parts, {warps} warps, any registers"
                    found[name] = by_adapter(polled, parts, warps, registers=0)
    else:
        names = [name for name in kernelhub.all_reduce_rms_norm.kernels() if "quant" in name]
        found |= {name: by_plan(name, format) for name in (*names, "torch.distributed")}
    if chosen_set is None:
        sums = {"selected sum": None, "NCCL": "torch.distributed"}
        found |= {f"{name}, norm apart": apart(kernel, format) for name, kernel in sums.items()}
    chosen = {
        name: form for name, form in found.items() if not only or name == ALONE or any(one in name for one in only)
    }
    return {name: form for name, form in chosen.items() if not any(one in name for one in without)}


class Graph:
    """Calls of a form, captured; with a tensor that a kernel of torch fills before each of them."""

    def __init__(self, call: Call, between: torch.Tensor | None = None) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        dist.barrier()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(GRAPH_CALLS):
                if between is not None:
                    between.fill_(1.0)
                self.result = call()

    def replay(self) -> Any:
        self.graph.replay()
        return self.result


def results(found: Any) -> list[torch.Tensor]:
    """The results of a call, as bits."""
    return [item.contiguous().view(torch.uint8).clone() for item in found if item is not None]


def checked(call: Call, want: Call, given: Operands, turns: int, world: int) -> tuple[int, list[int]]:
    """How many results are wrong, and how many bytes of each result of random numbers are other ones.

    Results of random numbers that are not the same bits on all ranks are wrong, too.
    """
    chosen, wrong = random.Random(0), 0
    captured = Graph(call)
    changes_operands = False
    for turn in range(turns):
        late, cycles = chosen.randrange(world), chosen.randrange(1, 1_000_000)
        given.fill(turn)
        expected = results(want())
        given.fill(turn)
        torch.cuda.synchronize()
        if late == given.rank:
            torch.cuda._sleep(cycles)
        found = call()
        places = {item.data_ptr() for item in found if item is not None}
        changes_operands = bool(places & {given.x.data_ptr(), given.residual.data_ptr()})
        wrong += differs(results(found), expected)
        if late != given.rank:
            torch.cuda._sleep(cycles // 2)
        if not changes_operands:  # else each call of the graph changes those of the next
            wrong += differs(results(captured.replay()), expected)
    given.fill(7, True)
    expected = results(want())
    given.fill(7, True)
    found = results(call())
    sums = torch.stack(
        [item.long().mul(torch.arange(1, item.numel() + 1, device=item.device).view_as(item)).sum() for item in found]
    )
    others = [torch.empty_like(sums) for _ in range(world)]
    dist.all_gather(others, sums)
    wrong += any(not torch.equal(sums, other) for other in others)
    return wrong, [int((a != b).sum()) for a, b in zip(found, expected, strict=True)]


def differs(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether the sum differs, which is exact, or a norm by more than a sum of squares in another order explains.

    That is one byte in a thousand of floats, and one in fifty of codes, of which many lie between two values.
    """
    share = 50 if len(found) > 2 else 1000
    norms = int((found[0] != expected[0]).sum()) * share > found[0].numel()
    return norms or not torch.equal(found[-1], expected[-1])


def run(rank: int, size: int, port: int, options: argparse.Namespace) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    _ = HUB.settings
    while options.after is not None and not options.after.exists():
        time.sleep(0.05)
    document = about(device, size)
    document["rows"] = {}
    bench = Bench(device, size, torch.bfloat16, None)
    for format in [None if name == "none" else name for name in options.format]:
        for width in options.widths:
            for rows in options.rows if width == options.widths[0] else options.few_rows:
                if options.set is not None and 2 * rows * width > MESSAGE_BYTES["1MB"]:
                    continue
                found = measured(bench, rank, rows, width, format, options)
                name = f"{format or 'no format'}, {width} wide, {rows} rows"
                document["rows"][name] = found
                if rank == 0:
                    print(f"==== {name}: {len(found)} forms", flush=True)
                    if options.json is not None:
                        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if rank == 0 and not options.prepare:
        print(*summary(document), sep="\n", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def measured(
    bench: Bench, rank: int, rows: int, width: int, format: str | None, options: argparse.Namespace
) -> dict[str, Any]:
    """Figures of each form that runs."""
    given = Operands(rows, width, rank, bench.device)
    of_names = forms(format, bench.size, width, options.only, options.without, options.set)
    made = {name: form(given, bench.group) for name, form in of_names.items()}
    calls = {name: call for name, call in made.items() if call is not None}
    if options.prepare:
        for call in calls.values():
            call()
        torch.cuda.synchronize()
        return {}
    reference = by_plan("torch.distributed" if options.against_nccl else None, format)(given, bench.group)
    assert reference is not None, "no kernel is selected"
    checks: dict[str, Any] = {}
    for name, call in calls.items():
        if name == ALONE or "apart" in name:
            continue
        want = as_tuple(calls[ALONE]) if name.startswith(ALONE) else reference
        checks[name] = checked(call, want, given, options.turns, bench.size)
    given.fill(0)
    times = graph_us(bench, calls, given, options.passes, None)
    between: dict[str, list[float]] = {}
    if rows in options.between_rows:
        not_in_place = {name: call for name, call in calls.items() if "in place" not in name}
        between = graph_us(bench, not_in_place, given, options.passes, torch.empty_like(given.x))
    sums = statistics.median(times[ALONE])
    found = {}
    for name, figures in times.items():
        wrong, bits = checks.get(name, (None, None))
        wrong = None if wrong is None else int(bench.slowest(float(wrong)))
        us = statistics.median(figures)
        found[name] = {"us": us, "ratio": round(us / sums, 3), "graph_us": figures}
        alike = next((times.get(f"{ALONE}, {early}") for early in ("early 1", "early 2") if early in name), None)
        if alike is not None:
            found[name]["ratio_alike"] = round(us / statistics.median(alike), 3)
        found[name] |= {"wrong": wrong, "unequal_bits": bits}
        if name in between:
            found[name]["between_us"] = between[name]
        if options.host:
            found[name]["host_us"] = bench.slowest(host_us(calls[name]))
    return found


def graph_us(
    bench: Bench, calls: dict[str, Call], given: Operands, passes: int, between: torch.Tensor | None
) -> dict[str, list[float]]:
    """Microseconds of a call in a graph, of the slowest rank, of all forms in turn."""
    graphs = {name: Graph(call, between) for name, call in calls.items()}
    for graph in graphs.values():
        graph.replay()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(passes):
        for name, graph in graphs.items():
            given.fill(0)
            times[name].append(bench.slowest(bench._timed(graph.replay, 10) / GRAPH_CALLS))
    return times


def as_tuple(call: Call) -> Call:
    return lambda: (call(),)


def host_us(call: Call) -> float:
    """Microseconds that a call keeps the host: of 20 in a row, the least of some rounds."""
    rounds = []
    for _ in range(10):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(GRAPH_CALLS):
            call()
        rounds.append((time.perf_counter() - begun) / GRAPH_CALLS * 1e6)
    torch.cuda.synchronize()
    return min(rounds)


class Target:
    """In place of Triton's CUDA driver, for processes that only compile."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> str:
        return "cuda:0"

    def get_current_stream(self, device: Any) -> int:
        return 0


def compile_forms(options: argparse.Namespace) -> None:
    """What the set `early` and the conformance of these kernels launch on an H200, each on every rank.

    CUDA_VISIBLE_DEVICES has to be empty: a tensor that is not there would begin CUDA, which does not outlive a fork.
    Then there is no current device either, which a launch would ask for.
    """
    connection.on_device_of = lambda tensor: contextlib.nullcontext()
    kinds = (adapters.OneShot, adapters.ClusteredRmsNorm, adapters.OneShotRmsNorm, adapters.PolledRmsNorm)
    jobs: dict[str, tuple[Any, ...]] = {}
    for width in options.widths:
        dtypes = ("bfloat16", "float32", "float16") if width in options.all_dtypes else ("bfloat16",)
        for kind in (*kinds, *early_kinds(width).values()):
            for num_bytes, dtype in itertools.product((1 << 15, 1 << 18, 1 << 20), dtypes):
                for rank in range(options.ranks):
                    job = (kind, num_bytes, width, options.ranks, dtype, rank)
                    jobs |= dict.fromkeys(compiled_by(*job, really=False), job)
    chosen = list(dict.fromkeys(jobs.values()))
    begun = time.perf_counter()
    forks = multiprocessing.get_context("fork")
    shares = [chosen[first :: options.compile] for first in range(options.compile)]
    workers = [forks.Process(target=lambda jobs: [compiled_by(*job) for job in jobs], args=(jobs,)) for jobs in shares]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    failed = sum(worker.exitcode != 0 for worker in workers)
    seconds = time.perf_counter() - begun
    print(f"compiled {len(jobs)} kernels of {len(chosen)} adapters in {seconds:.0f} s; {failed} processes failed")


def compiled_by(
    kind: type, num_bytes: int, width: int, ranks: int, dtype: str, rank: int, really: bool = True
) -> list[str]:
    """Compile what an adapter launches; or only name it."""
    names: list[str] = []
    adapter = adapter_of(kind, num_bytes, width, ranks, simulated("H200"), dtype)
    if adapter is None:
        return names
    prepare = Launcher.prepare

    def named(self: Launcher, programs: int, variant: Any, *arguments: Any) -> None:
        names.append(repr((self._kernel.fn.__name__, sorted(self._named.items()), dtype)))

    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.simplefilter("ignore")  # of the addresses of such tensors, which are whole units
        triton.runtime.driver.set_active(Target())
        Launcher.prepare = prepare if really else named
        try:
            adapter.attach("ranks that are not here", absent_ranks(rank, ranks))
        finally:
            Launcher.prepare = prepare
    return names


def absent_ranks(rank: int, ranks: int) -> Any:
    """What a kernel needs of a workspace to be compiled."""
    addresses = (*[1 << 40] * ranks, *[0] * (MOST_RANKS - ranks))
    counters = torch.empty(MOST_PROGRAMS, dtype=torch.int32, device="cuda")
    return SimpleNamespace(
        rank=rank,
        world_size=ranks,
        capacity=1 << 20,
        device=torch.device("cuda", 0),
        slots=addresses,
        turn_slots=addresses,
        counters=counters,
        turn_counters=counters,
        missing=torch.empty(MOST_RANKS, dtype=torch.int8, device="cuda"),
        owner=None,
        shared=lambda *more: None,
        zeros=lambda count: torch.empty(count, dtype=torch.int32, device="cuda"),
    )


def summary(document: dict[str, Any]) -> Iterator[str]:
    """By format, width and form: microseconds and, of the sum alone, the times, by rows; then what was wrong."""
    tables: dict[str, dict[str, dict[str, str]]] = {}
    for name, found in document["rows"].items():
        of, rows = name.rsplit(", ", 1)
        for form, row in found.items():
            shown = f"{row['us']:.2f}/{row['ratio']:.2f}"
            shown += f"/{row['ratio_alike']:.2f}" if "ratio_alike" in row else ""
            shown += f"+{statistics.median(row['between_us']):.2f}" if "between_us" in row else ""
            tables.setdefault(of, {}).setdefault(form, {})[rows.removesuffix(" rows")] = shown
    for of, forms_of in tables.items():
        yield f"{of}:"
        for form, cells in forms_of.items():
            yield f"  {form}: " + " ".join(f"{rows}:{cell}" for rows, cell in cells.items())
    wrong = [
        f"{name}, {form}: wrong {row['wrong']}, bits {row['unequal_bits']}"
        for name, found in document["rows"].items()
        for form, row in found.items()
        if row["wrong"] or any(row["unequal_bits"] or ())
    ]
    yield "wrong, or with other bits: " + ("; ".join(wrong) or "none")


def show(files: list[Path]) -> None:
    """The tables of files that were written, also by a run that was ended."""
    for file in files:
        print(f"{file.name}:")
        print(*(summary(json.loads(file.read_text())) if file.exists() else ["nothing was written"]), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="of the first width")
    parser.add_argument("--few-rows", nargs="+", type=int, default=FEW_ROWS, help="of the others")
    parser.add_argument("--format", nargs="+", default=["none"], help="forms of the norm, as of rms_norm_quant")
    parser.add_argument("--only", nargs="+", default=[], help="forms that have one of these in their names")
    parser.add_argument("--without", nargs="+", default=[], help="forms that have none of these in their names")
    parser.add_argument("--set", choices=["early"], help="other forms than the usual ones")
    parser.add_argument("--between-rows", nargs="+", type=int, default=[], help="measured in a model's graph, too")
    parser.add_argument("--host", action="store_true", help="measure what eager calls keep the host, too")
    parser.add_argument("--compile", type=int, metavar="PROCESSES", help="only compile, for an H200")
    parser.add_argument("--all-dtypes", nargs="+", type=int, default=[], help="widths that are compiled so")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--turns", type=int, default=12, help="calls that are checked of each form")
    parser.add_argument("--against-nccl", action="store_true", help="compare with torch.distributed's results")
    parser.add_argument("--prepare", action="store_true", help="only compile what other runs measure")
    parser.add_argument("--after", type=Path, help="measure only once there is this file, whatever wrote it")
    parser.add_argument("--json", type=Path, help="file for the results, rewritten after each size")
    parser.add_argument("--show", nargs="+", type=Path, help="print the table of such files, and measure nothing")
    options = parser.parse_args()
    if options.show:
        show(options.show)
        return
    if options.compile:
        compile_forms(options)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run, (options.ranks, port, options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
