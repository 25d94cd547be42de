"""Conformance of one kernel of a collective on several GPUs; `test_comm_on_gpu.py` and a person run it.

    python -m tests.gpu.comm_conformance all_reduce torch.symm_mem_one_shot --ranks 2
    python -m tests.gpu.comm_conformance all_reduce_rms_norm triton.one_shot_quant --format fp8_group --ranks 2
    python -m tests.gpu.comm_conformance all_reduce_rms_norm triton.one_shot_clustered --change early=1 --ranks 2

It starts the ranks and prints a JSON object for each form: for each scene, what was wrong on each rank; an empty list
is right.
A scene that is missing did not end in time: `at` names the one that ran then, and each rank prints its stack to stderr
shortly before the limit. Payloads are small integers, whose sums are exact in every dtype and order, except where a
scene says otherwise.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")

import torch
import torch.distributed as dist
from torch import Tensor

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import KernelhubError, NotWarmed
from kernelhub.ops.comm.problem import MESSAGE_BYTES
from kernelhub.ops.comm.tolerance import normalised_error_allowed, sum_error_allowed
from kernelhub.ops.fused_quant.cases import judged
from kernelhub.ops.fused_quant.inputs import form_of
from kernelhub.ops.fused_quant.reference import normalised
from tests.gpu import comm_places
from tests.runtime.world import _free_port

HIDDEN = 2048
WIDTHS = (4096, 7168, 2880, 5120, 8192, 1023)  # of models, and an odd one: each has its own launch
SEALED_WIDTH = 3072
EPS = 1e-5
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
_CHAIN = 40  # calls of a graph


class Scenes:
    """The scenes of one kernel on one rank."""

    def __init__(
        self,
        op: str,
        kernel: str,
        rank: int,
        size: int,
        calls: int,
        most_rows: int,
        format: str | None = None,
        hidden: int = HIDDEN,
        only: Sequence[str] = (),
    ) -> None:
        self.only = only
        self.format = format
        self.op, self.kernel, self.rank, self.size, self.calls = op, kernel, rank, size, calls
        self.most_rows = most_rows
        self.device = torch.device("cuda", rank)
        self.group = dist.group.WORLD
        self.plans: dict[torch.dtype, Any] = {}
        self.hidden = hidden
        self.row: tuple[Hashable, Tensor] | None = None  # the last operands, and the norm of their sum
        self.form: dict[str, Any] = {} if format is None else form_of(format, self.device)
        self.scales = {name: value for name, value in self.form.items() if name != "format"}

    def dtypes(self) -> list[torch.dtype]:
        return [dtype for dtype in DTYPES if self.plan(dtype) is not None]

    def plan(self, dtype: torch.dtype) -> Any:
        """The plan of a dtype, or None if the kernel does not have it, on every rank."""
        if dtype not in self.plans:
            function = getattr(kernelhub, self.op)
            try:
                made = function.prepare(
                    *self.operands(8, dtype, 0),
                    group=self.group,
                    backend=[self.kernel, "torch.distributed"],
                    **self.form,
                )
            except KernelhubError:
                made = None
            self.plans[dtype] = made if made is not None and self.kernel in made.kernels.values() else None
        return self.plans[dtype]

    def run(self, dtype: torch.dtype, *given: Any, **places: Any) -> Any:
        return self.plan(dtype).run(*given, **places, **self.scales)

    def integers(self, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        # On the GPU: the processor takes minutes for the largest messages. GPUs of one model give equal numbers.
        chosen = torch.Generator(device=self.device).manual_seed(seed)
        return torch.randint(-8, 9, shape, generator=chosen, device=self.device).to(dtype)

    def shape(self, rows: int) -> tuple[int, ...]:
        return (rows * self.size if self.op == "reduce_scatter" else rows, self.hidden)

    def operands(self, rows: int, dtype: torch.dtype, seed: int, rank: int | None = None) -> list[Any]:
        rank = self.rank if rank is None else rank
        x = self.integers(self.shape(rows), dtype, 1000 * seed + rank)
        if self.op != "all_reduce_rms_norm":
            return [x]
        residual = self.integers(self.shape(rows), dtype, 1000 * seed + 998)
        return [x, residual, self.integers((self.hidden,), dtype, 1000 * seed + 999), EPS]

    def wanted(self, rows: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
        """The results, exact but for the norm, in float64."""
        parts = [self.operands(rows, dtype, seed, rank)[0].double() for rank in range(self.size)]
        if self.op == "all_gather":
            return (torch.cat(parts),)
        total = torch.stack(parts).sum(0)
        if self.op == "reduce_scatter":
            return (total.tensor_split(self.size)[self.rank],)
        if self.op == "all_reduce":
            return (total,)
        _, residual, weight, eps = self.operands(rows, dtype, seed)
        total = total + residual.double()
        return (total * (total.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double(), total)

    def wrong(self, found: Any, rows: int, dtype: torch.dtype, seed: int) -> bool:
        found = found if isinstance(found, tuple) else (found,)
        *norms, total = self.wanted(rows, dtype, seed)
        if not torch.equal(found[-1].double(), total.to(dtype).double()):
            return True
        if not norms or not rows:
            return False
        weight = self.operands(rows, dtype, seed)[2]
        if self.format is not None:
            return not self.quantised_as_alone(found, weight, (rows, self.hidden, dtype, seed))
        exact = torch.full_like(total, 0.0)
        # The sum is exact, or rounded once more where a kernel squares the rounded one.
        exact += sum_error_allowed([total], dtype)
        allowed = normalised_error_allowed(norms[0], total, weight.double(), EPS, exact, dtype)
        return not bool(((found[0].double() - norms[0]).abs() <= allowed).all())

    def quantised_as_alone(self, found: tuple[Tensor, ...], weight: Tensor, operands: Hashable) -> bool:
        """Whether codes and scales are within the bounds of `rms_norm_quant` of the sum, which is the right one."""
        codes, scale, total = found
        # The processor takes most of the time of a scene: once for all ways to call with these operands.
        if self.row is None or self.row[0] != operands:
            self.row = operands, normalised(total.cpu(), weight.cpu(), EPS, False).to(self.device)
        row = self.row[1]
        given = {"x": total, **self.form}
        return all(ratio <= 1.0 for ratio, _ in judged({"out": codes, "out_scale": scale}, given, row))

    def sizes(self, dtype: torch.dtype) -> list[int]:
        """Rows of messages on both sides of each bucket's edge that the kernel has, and small ones."""
        row = self.hidden * dtype.itemsize * (self.size if self.op == "reduce_scatter" else 1)
        plan = self.plan(dtype)
        edges = [size // row for name, size in MESSAGE_BYTES.items() if plan.kernels.get(name) == self.kernel]
        rows = {0, 1, 3, *(edge + step for edge in edges for step in (-1, 0, 1))} - {-1}
        return sorted(count for count in rows if count <= self.most_rows)

    def sums(self) -> list[str]:
        """Every size, dtype and way to call."""
        wrong = []
        for dtype in self.dtypes():
            for rows in self.sizes(dtype):
                given = self.operands(rows, dtype, rows)
                found = {"run": self.run(dtype, *given), "again": self.run(dtype, *given)}
                wide = torch.full((*given[0].shape, 2), torch.nan, dtype=dtype, device=self.device)
                wide[..., 1] = given[0]
                found["strided"] = self.run(dtype, wide[..., 1], *given[1:])
                if self.op in ("all_reduce", "all_reduce_rms_norm"):
                    own = given[0].clone()
                    place_of = "out" if self.format is None else "residual_out"
                    found["in place"] = self.run(dtype, own, *given[1:], **{place_of: own})
                    if self.op == "all_reduce_rms_norm":
                        before = given[1].clone()
                        found["residual in place"] = self.run(dtype, given[0], before, *given[2:], residual_out=before)
                        if self.format is None:
                            own, before = given[0].clone(), given[1].clone()
                            found["both in place"] = self.run(
                                dtype, own, before, *given[2:], out=own, residual_out=before
                            )
                    place = wide[..., 0]
                    if rows and self.op == "all_reduce":
                        found["strided out"] = self.run(dtype, *given, out=place)
                wrong += [
                    f"{name}: {dtype} {rows} rows"
                    for name, result in found.items()
                    if self.wrong(result, rows, dtype, rows)
                ]
        return wrong

    def odd_widths(self) -> list[str]:
        """Messages that no vector divides, at addresses that are not aligned."""
        if self.op != "all_reduce":
            return []
        wrong = []
        for dtype in self.dtypes():
            for count in (1, 3, 7, 129, 1023):
                x = self.integers((count,), dtype, self.rank)
                shifted = torch.empty(count + 1, dtype=dtype, device=self.device)[1:].copy_(x)
                want = torch.stack([self.integers((count,), dtype, other).double() for other in range(self.size)]).sum(
                    0
                )
                out = torch.full((count + 2,), torch.nan, dtype=dtype, device=self.device)
                found = {"run": self.plan(dtype).run(shifted), "out": self.plan(dtype).run(x, out=out[1:-1])}
                if not bool(out[[0, -1]].isnan().all()):
                    wrong.append(f"written past: {dtype} {count}")
                wrong += [
                    f"{name}: {dtype} {count}" for name, got in found.items() if not torch.equal(got.double(), want)
                ]
        return wrong

    def widths(self) -> list[str]:
        """Rows of other widths, few and many, twice each."""
        if self.op != "all_reduce_rms_norm":
            return []
        wrong, before, plans = [], self.hidden, self.plans
        for hidden in WIDTHS:
            self.hidden, self.plans = hidden, {}
            dtypes = DTYPES if hidden == WIDTHS[0] else DTYPES[:1]
            for dtype in [dtype for dtype in dtypes if self.plan(dtype) is not None]:
                for rows in (1, 3, 16, 64, 200):
                    given = self.operands(rows, dtype, rows)
                    found = [self.run(dtype, *given) for _ in range(2)]
                    wrong += [
                        f"{dtype} {rows} rows of {hidden}" for result in found if self.wrong(result, rows, dtype, rows)
                    ]
        self.hidden, self.plans = before, plans
        return wrong

    def same_bits(self) -> list[str]:
        """Sums of fractions have equal bits on all ranks, and each time."""
        if self.op in ("reduce_scatter", "all_gather"):
            return []
        wrong = []
        for dtype in self.dtypes():
            for rows in self.sizes(dtype)[1:]:
                given = self.operands(rows, dtype, 5)
                given[0] = torch.randn(given[0].shape, device=self.device, dtype=torch.float32).to(dtype)
                results = [self.run(dtype, *given) for _ in range(2)]
                parts = [part for result in results for part in (result if isinstance(result, tuple) else (result,))]
                bits = torch.stack([part.float().view(torch.int32).long().sum() for part in parts])  # of codes, too
                others = [torch.empty_like(bits) for _ in range(self.size)]
                dist.all_gather(others, bits)
                half = len(bits) // 2
                if not torch.equal(bits[:half], bits[half:]) or any(not torch.equal(bits, other) for other in others):
                    wrong.append(f"{dtype} {rows} rows")
        return wrong

    def graphs(self) -> list[str]:
        """Replays with changed inputs, of graphs of several sizes in turn, with eager calls between."""
        wrong = []
        for dtype in self.dtypes()[:2]:
            rows_of = [rows for rows in self.sizes(dtype) if 0 < rows < 2000][:4]
            captured = []
            for rows in rows_of:
                given = self.operands(rows, dtype, 1)
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                dist.barrier()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    first = self.run(dtype, *given)
                    second = self.run(dtype, *given)
                captured.append((rows, given, graph, first, second))
            for turn in range(100):
                rows, given, graph, first, second = captured[turn % len(captured)]
                changed = self.operands(rows, dtype, turn)
                for place, value in zip(given, changed, strict=True):
                    if isinstance(place, Tensor):
                        place.copy_(value)
                graph.replay()
                eager = self.run(dtype, *changed) if turn % 3 == 0 else first
                if any(self.wrong(result, rows, dtype, turn) for result in (first, second, eager)):
                    wrong.append(f"{dtype} {rows} rows, replay {turn}")
        return wrong

    def chains(self) -> list[str]:
        """A graph of many calls of several sizes, some in place; replays with changed inputs, and a rank that is late.

        Launches that begin early where they are captured do so here.
        """
        dtype = self.dtypes()[0]
        rows_of = [rows for rows in self.sizes(dtype)[:-1] if 0 < rows < 200]  # the last is another kernel's
        given = {rows: self.operands(rows, dtype, 0) for rows in rows_of}
        graph, found = torch.cuda.CUDAGraph(), []
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for turn in range(_CHAIN):
                rows = rows_of[turn % len(rows_of)]
                x, *others = given[rows]
                own = x.clone() if turn % 7 == 6 and self.op in ("all_reduce", "all_reduce_rms_norm") else x
                place = {} if own is x else {"out" if self.format is None else "residual_out": own}
                found.append((rows, self.run(dtype, own, *others, **place)))
        wrong = []
        for turn in range(20):
            for rows, operands in given.items():
                for place, value in zip(operands, self.operands(rows, dtype, turn), strict=True):
                    if isinstance(place, Tensor):
                        place.copy_(value)
            if turn % self.size == self.rank:
                torch.cuda._sleep(500_000)
            graph.replay()
            wrong += [
                f"replay {turn}, call {at}: {rows} rows"
                for at, (rows, result) in enumerate(found)
                if self.wrong(result, rows, dtype, turn)
            ]
        return wrong

    def delayed(self) -> list[str]:
        """One rank comes later, another each time."""
        wrong = []
        dtype = self.dtypes()[0]
        rows_of = [rows for rows in self.sizes(dtype) if rows < 2000]
        chosen = random.Random(0)
        for turn in range(100):
            late, cycles, rows = chosen.randrange(self.size), chosen.randrange(1, 2_000_000), chosen.choice(rows_of)
            given = self.operands(rows, dtype, turn)
            if late == self.rank:
                torch.cuda._sleep(cycles)
            found = self.run(dtype, *given)
            if late != self.rank:
                torch.cuda._sleep(cycles // 2)
            if self.wrong(found, rows, dtype, turn):
                wrong.append(f"{rows} rows, call {turn}")
        return wrong

    def many(self) -> list[str]:
        """Calls without a pause, of several sizes in turn, some in place of x or of the residual, on one rank or more.

        Each result is compared on the device.
        """
        dtype = self.dtypes()[0]
        cases = []
        for rows in [rows for rows in self.sizes(dtype) if rows < 200]:
            given = self.operands(rows, dtype, 3)
            cases.append((rows, given, self.wanted(rows, dtype, 3)[-1].to(dtype)))
        errors = torch.zeros((), dtype=torch.int64, device=self.device)
        for turn in range(self.calls):
            _, (x, *others), want = cases[turn % len(cases)]
            which = (turn + self.rank * (turn // 100 % 2)) % 3  # for a hundred calls as on other ranks, then not
            own = x.clone() if which == 0 and self.op in ("all_reduce", "all_reduce_rms_norm") else x
            place = {} if own is x else {"out" if self.format is None else "residual_out": own}
            if which == 1 and self.op == "all_reduce_rms_norm":
                others[0] = place["residual_out"] = others[0].clone()
            found = self.run(dtype, own, *others, **place)
            errors += (found[-1] if isinstance(found, tuple) else found).ne(want).any()
        return [] if not int(errors) else [f"{int(errors)} of {self.calls} calls"]

    def side_streams(self) -> list[str]:
        """Calls on two streams in turn, each after the other."""
        dtype = self.dtypes()[0]
        rows = 3
        given = [self.operands(rows, dtype, seed) for seed in range(20)]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(2)]
        found = []
        for turn, operands in enumerate(given):
            stream, before = streams[turn % 2], streams[(turn + 1) % 2]
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                found.append(self.run(dtype, *operands))
        torch.cuda.synchronize()
        return [f"call {turn}" for turn, got in enumerate(found) if self.wrong(got, rows, dtype, turn)]

    def places(self) -> list[str]:
        """Runs into given tensors, other ones each time, eager and in graphs."""
        run, wrong = functools.partial(self.run, (dtype := self.dtypes()[0])), []
        kinds = comm_places.kinds_of(self.op, self.format is not None)
        rows_of = [rows for rows in self.sizes(dtype) if 0 < rows < 200][::2]
        cases = [[self.placed(rows, dtype, seed) for seed in range(4)] for rows in rows_of]
        for rows in cases:
            wrong += comm_places.in_graphs(run, kinds, rows[0], rows[1:], self.capture)
        return wrong + comm_places.eager(run, kinds, [one for rows in cases for one in rows], self.calls, self.rank)

    def placed(self, rows: int, dtype: torch.dtype, seed: int) -> tuple[list[Any], dict[str, Tensor]]:
        """Operands, and the right results by the names of their places."""
        operands = self.operands(rows, dtype, seed)
        found = self.run(dtype, *operands)
        assert not self.wrong(found, rows, dtype, seed), f"{rows} rows without places"
        found = found if isinstance(found, tuple) else (found,)
        names = {1: ("out",), 2: ("out", "residual_out"), 3: ("out", "out_scale", "residual_out")}[len(found)]
        results = {name: one.clone() for name, one in zip(names, found, strict=True)}
        if "scale" in self.scales:  # the result is the one that was given
            del results["out_scale"]
        return operands, results

    def capture(self, runs: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            runs()
        return graph

    def sealed(self) -> list[str]:
        """Runs of a plan of rows that no scene had before: its `prepare` compiled all that they need."""
        before, plans = self.hidden, self.plans
        self.hidden, self.plans = SEALED_WIDTH, {}
        wrong, found, dtype = [], [], DTYPES[0]
        if self.plan(dtype) is not None:
            torch.cuda.synchronize()
            with kernelhub.seal():
                for rows in (1, 3, 64, 200):
                    given = self.operands(rows, dtype, rows)
                    try:
                        found.append((rows, self.run(dtype, *given)))
                    except NotWarmed as error:
                        wrong.append(f"{rows} rows: {error}"[:300])
        wrong += [f"{rows} rows" for rows, result in found if self.wrong(result, rows, dtype, rows)]
        self.hidden, self.plans = before, plans
        return wrong

    def act(self, write: Callable[[dict[str, Any]], None]) -> None:
        answers: dict[str, Any] = {"kernels": {}}
        for dtype in DTYPES:
            plan = self.plan(dtype)
            answers["kernels"][str(dtype)] = None if plan is None else plan.kernels
            if plan is not None:
                answers.setdefault("parts", {})[str(dtype)] = plan.said
                answers["connection"] = [plan.connection.link, plan.connection.peers, plan.connection.why]
        write(answers)
        if not self.dtypes():
            answers["unsupported"] = str(
                getattr(kernelhub, self.op).explain(*self.operands(8, DTYPES[0], 0), self.group, **self.form)
            )
            write(answers)
            return
        scenes = [
            *(self.sums, self.odd_widths, self.widths, self.same_bits),
            *(self.graphs, self.chains, self.delayed, self.side_streams, self.many, self.places, self.sealed),
        ]
        scenes = [scene for scene in scenes if not self.only or scene.__name__ in self.only]
        seconds = answers["seconds"] = {}
        for scene in scenes:
            began = time.monotonic()
            answers["at"] = scene.__name__
            write(answers)
            answers[scene.__name__] = scene()
            torch.cuda.synchronize()
            seconds[scene.__name__] = round(time.monotonic() - began, 1)
        answers["at"] = "end"
        write(answers)


def file_of(folder: str, format: str | None, rank: int) -> Path:
    """Where a rank writes what it found."""
    return Path(folder) / f"{format}.{rank}"


def write(place: Path, answers: dict[str, Any]) -> None:
    """Whole, also if the process is ended in between."""
    whole = place.with_name(f"{place.name}.new")
    whole.write_text(json.dumps(answers))
    whole.replace(place)


def live(
    rank: int,
    size: int,
    port: int,
    op: str,
    kernel: str,
    calls: int,
    most_rows: int,
    hidden: int,
    folder: str,
    formats: Sequence[str | None],
    limit_s: float,
    after: Path | None,
    only: Sequence[str],
    changed: dict[str, int],
) -> None:
    torch.set_num_threads(4)  # all cores for each of several ranks, which take turns, are slower
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    _ = HUB.settings
    change(op, kernel, changed)
    torch.zeros(1, device="cuda")
    wait_for(after)
    faulthandler.dump_traceback_later(max(1.0, limit_s - 3.0))
    for format in formats:
        place = file_of(folder, format, rank)
        scenes = Scenes(op, kernel, rank, size, calls, most_rows, format, hidden, only)
        scenes.act(lambda answers, place=place: write(place, answers))
    dist.barrier()
    os._exit(0)


def wait_for(file: Path | None) -> None:
    """Until somebody has written a file: many processes import at once, and then take turns on the GPUs."""
    while file is not None and not file.exists():
        time.sleep(0.05)


def change(op: str, kernel: str, changed: dict[str, int]) -> None:
    """Give the class of a kernel's adapter other values: a form that nothing selects yet."""
    (record,) = [one for one in HUB.registry.candidates(op).kernels if one.name == kernel]
    module, name = record.target.split(":")
    adapter = getattr(importlib.import_module(module), name)
    for attribute, value in changed.items():
        setattr(adapter, attribute, type(getattr(adapter, attribute))(value))


def run_ranks(
    live: Callable[..., None],
    given: tuple[Any, ...],
    count: int,
    limit_s: float,
    after: Path | None,
    show: Callable[[list[int | None]], None],
) -> None:
    """Run `live(rank, *given)` in a process for each rank until the limit, which counts from when `after` is there.

    `show` gets the exit codes, also where this process is ended.
    """
    context = torch.multiprocessing.get_context("spawn")
    ranks = [context.Process(target=live, args=(rank, *given)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # of `timeout`: what ran until then is printed
    try:
        wait_for(after)
        until = time.monotonic() + limit_s
        for rank in ranks:
            rank.join(max(0.0, until - time.monotonic()))
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
            rank.join()
        show([rank.exitcode for rank in ranks])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op")
    parser.add_argument("kernel")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--calls", type=int, default=10_000, help="calls of the scene `many`")
    parser.add_argument("--most-rows", type=int, default=1 << 20, help="of a message; fewer under compute-sanitizer")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="elements of a row, but in the scene `widths`")
    parser.add_argument("--format", nargs="+", default=[None], help="of all_reduce_rms_norm: forms of the norm")
    parser.add_argument("--scenes", nargs="+", default=[], help="only these")
    parser.add_argument("--change", nargs="+", default=[], help="NAME=NUMBER of the adapter's class, as early=1")
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--after", type=Path, help="begin once there is this file; the limit counts from then")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = (options.ranks, _free_port(), options.op, options.kernel, options.calls, options.most_rows)
        given = (*given, options.hidden, folder, options.format, options.limit_s, options.after)
        changed = {name: int(value) for name, value in (one.split("=") for one in options.change)}
        given = (*given, options.scenes, changed)

        def show(ended: list[int | None]) -> None:
            for format in options.format:
                files = [file_of(folder, format, rank) for rank in range(options.ranks)]
                answers = [json.loads(file.read_text()) if file.exists() else None for file in files]
                of_form = {} if format is None else {"format": format}
                print(json.dumps({**of_form, "ended": ended, "ranks": answers}), flush=True)

        run_ranks(live, given, options.ranks, options.limit_s, options.after, show)


if __name__ == "__main__":
    main()
