"""Collectives on the GPUs (or CPUs) of one machine: every kernel that runs, by message size, eager and in CUDA graphs.

    python benchmarks/comm.py --ranks 2                      # starts its ranks
    torchrun --nproc-per-node 4 benchmarks/comm.py --json out.json

Times are microseconds of a call on the slowest rank: of 50 eager calls in a row, and of 20 calls in one graph. `host`
is the time that the CPU needs for a call. `share` is the bus bandwidth of a call, as nccl-tests define it, over that of
copies between all neighbours at once, which are measured in the same run.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

# Before CUDA and NCCL start: multicast over NVLink is off in every kernel here.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")

import torch
import torch.distributed as dist

import kernelhub
from kernelhub.errors import KernelhubError
from kernelhub.ops import functions
from kernelhub.ops.fused_quant.formats import format_of
from kernelhub.ops.fused_quant.inputs import form_of

KIB = 1024
SIZES = tuple(
    size * KIB for size in (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192, 16384, 32768, 65536, 262144)
)
OPS = ("all_reduce", "all_reduce_rms_norm", "reduce_scatter", "all_gather")
HIDDEN = 4096
EAGER_CALLS, GRAPH_CALLS, HOST_CALLS = 50, 20, 100


def main() -> None:
    options = parse()
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, options)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run, (options.ranks, port, options), nprocs=options.ranks)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()), help="ranks to start")
    parser.add_argument("--ops", nargs="+", default=OPS, choices=OPS)
    parser.add_argument("--kernels", nargs="+", default=[], help="kernels to measure; by default all that run")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes of a rank's message")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--format", help="form of the norm of all_reduce_rms_norm, as of rms_norm_quant")
    parser.add_argument("--after", type=Path, help="measure only once there is this file, whatever wrote it")
    parser.add_argument("--json", type=Path, help="file for the results, rewritten after each row")
    options = parser.parse_args(arguments)
    if options.ranks < 1 or min(options.sizes) < 1:
        parser.error("--ranks and --sizes are 1 or more")
    known = {kernel for op in options.ops for kernel in kernels_of(op)}
    for name in options.kernels:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f": {', '.join(sorted(known))}"
            parser.error(f"--kernels: {name} is no kernel of {', '.join(options.ops)}{hint}")
    try:
        format_of("--format", options.format)
    except KernelhubError as error:
        parser.error(str(error))
    return options


def run(rank: int, size: int, port: int | None, options: argparse.Namespace) -> None:
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = None if port is None else dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    place = {} if store is None else {"store": store, "rank": rank, "world_size": size}
    dist.init_process_group(backend, timeout=timedelta(seconds=120), **place)
    while options.after is not None and not options.after.exists():
        time.sleep(0.05)
    report = Report(rank, about(device, size), options.json)
    bench = Bench(device, size, getattr(torch, options.dtype), options.format)
    if device.type == "cuda":
        report.add("roof_gb_s", bench.roof())
    for name in options.ops:
        for kernel in options.kernels or kernels_of(name):
            measure(bench, report, name, kernel, options.sizes)
        if name == "all_reduce_rms_norm" and options.format:
            measure_apart(bench, report, options.sizes)
    dist.barrier()
    dist.destroy_process_group()


def kernels_of(op: str) -> tuple[str, ...]:
    function = next(function for function in functions() if function.__name__ == op)
    return tuple(name for name in function.kernels() if not name.startswith("unsupported."))


def about(device: torch.device, size: int) -> dict[str, Any]:
    """Device, versions and date."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else ""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "nccl": nccl}
    return {"device": name, "ranks": size, "date": now, **versions, "rows": []}


class Report:
    """The results of rank 0, printed and written row by row, so that a kernel that hangs loses only its own."""

    def __init__(self, rank: int, document: dict[str, Any], file: Path | None) -> None:
        self.rank, self.document, self.file = rank, document, file
        if rank == 0:
            print({name: value for name, value in document.items() if name != "rows"}, flush=True)
            head = f"{'op':20} {'kernel':28} {'bytes':>10} {'eager us':>9} {'graph us':>9} {'host us':>8} {'share':>6}"
            print(head, flush=True)

    def add(self, name: str, value: Any) -> None:
        self.document[name] = value
        if self.rank == 0:
            print(f"{name}: {value}", flush=True)
        self._write()

    def row(self, row: dict[str, Any]) -> None:
        roof, graph = self.document.get("roof_gb_s"), row["graph_us"] or row["eager_us"]
        row["share"] = round(row.pop("bus_bytes") / graph / 1e3 / roof, 3) if roof else None
        self.document["rows"].append(row)
        if self.rank == 0:
            figures = [row["eager_us"], row["graph_us"], row["host_us"], row["share"]]
            shown = " ".join(
                f"{'-' if figure is None else figure:>{width}}"
                for figure, width in zip(figures, (9, 9, 8, 6), strict=True)
            )
            print(f"{row['op']:20} {row['kernel']:28} {row['bytes']:>10} {shown}", flush=True)
        self._write()

    def _write(self) -> None:
        if self.rank == 0 and self.file:
            self.file.write_text(json.dumps(self.document, indent=1) + "\n")


class Bench:
    """Measures on all ranks together; every figure is that of the slowest rank."""

    def __init__(self, device: torch.device, size: int, dtype: torch.dtype, format: str | None) -> None:
        self.device, self.size, self.dtype = device, size, dtype
        self.form = form_of(format, device) if format else {}
        self.group = dist.group.WORLD
        self.on_gpu = device.type == "cuda"

    def operands(self, op: str, num_bytes: int) -> dict[str, Any] | None:
        """Arguments of a call with a message of this size, or None if there is none."""
        count = num_bytes // self.dtype.itemsize
        if op == "all_reduce_rms_norm":
            if count % HIDDEN:
                return None
            x = torch.ones(count // HIDDEN, HIDDEN, dtype=self.dtype, device=self.device)
            weight = torch.ones(HIDDEN, dtype=self.dtype, device=self.device)
            return {"x": x, "residual": x.clone(), "weight": weight, "eps": 1e-5}
        return {"x": torch.ones(count, dtype=self.dtype, device=self.device)}

    def eager_us(self, call: Callable[[], Any]) -> float:
        for _ in range(3):
            call()
        best = float("inf")
        for _ in range(3):
            best = min(best, self._timed(call, EAGER_CALLS))
        return self.slowest(best)

    def graph_us(self, call: Callable[[], Any]) -> float:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(GRAPH_CALLS):
                call()
        for _ in range(3):
            graph.replay()
        best = min(self._timed(graph.replay, 10) for _ in range(3)) / GRAPH_CALLS
        torch.cuda.synchronize()
        return self.slowest(best)

    def host_us(self, call: Callable[[], Any]) -> float:
        best = float("inf")
        for _ in range(3):
            self._meet()
            begun = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            best = min(best, (time.perf_counter() - begun) / HOST_CALLS * 1e6)
            self._meet()
        return self.slowest(best)

    def roof(self) -> float:
        """GB/s that each rank writes to its neighbour while all do."""
        from torch.distributed import _symmetric_memory as symmetric

        num_bytes = 256 << 20
        buffer = symmetric.empty(num_bytes, dtype=torch.uint8, device=self.device)
        handle = symmetric.rendezvous(buffer, self.group)
        peer = handle.get_buffer((handle.rank + 1) % self.size, (num_bytes,), torch.uint8)
        own = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        us = self.slowest(min(self._timed(lambda: peer.copy_(own), 10) for _ in range(3)))
        return round(num_bytes / us / 1e3, 1)

    def _timed(self, call: Callable[[], Any], times: int) -> float:
        """Microseconds of a call of several in a row."""
        self._meet()
        if not self.on_gpu:
            begun = time.perf_counter()
            for _ in range(times):
                call()
            return (time.perf_counter() - begun) / times * 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / times * 1e3

    def _meet(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
        if self.on_gpu:
            torch.cuda.synchronize()

    def slowest(self, value: float) -> float:
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return round(float(found), 2)


def bus_bytes(op: str, num_bytes: int, size: int) -> float:
    """Bytes that each rank must send over its link at least; a message of `all_gather` is what a rank gives."""
    per_message = {"all_gather": size - 1.0, "reduce_scatter": (size - 1) / size}
    return num_bytes * per_message.get(op, 2 * (size - 1) / size)


def measure(bench: Bench, report: Report, op: str, kernel: str, sizes: tuple[int, ...]) -> None:
    function = getattr(kernelhub, op)
    for num_bytes in sizes:
        operands = bench.operands(op, num_bytes)
        if operands is None:
            continue
        try:
            form = bench.form if op == "all_reduce_rms_norm" else {}
            plan = function.prepare(**operands, **form, group=bench.group, backend=[kernel, "torch.distributed"])
        except KernelhubError as error:
            if report.rank == 0:
                print(f"{op:20} {kernel:28} {num_bytes:>10} {str(error).splitlines()[0]}", flush=True)
            return
        if plan.kernel != kernel:
            continue  # not for this size
        given = list(operands.values())
        x = operands["x"]
        shape = {
            "all_gather": (x.shape[0] * bench.size, *x.shape[1:]),
            "reduce_scatter": (x.shape[0] // bench.size, *x.shape[1:]),
        }
        places = {"out": torch.empty(shape.get(op, x.shape), dtype=x.dtype, device=x.device)}
        if op == "all_reduce_rms_norm":
            places["residual_out"] = torch.empty_like(x)
        if form:  # the result is of another dtype
            places = {"residual_out": places["residual_out"], **_scales(form)}
        run_plan = plan.run

        def call(run: Any = run_plan, given: Any = given, places: Any = places) -> None:
            run(*given, **places)

        graph = bench.graph_us(call) if bench.on_gpu else None
        row = {"op": op, "kernel": kernel, "bytes": num_bytes, "eager_us": bench.eager_us(call), "graph_us": graph}
        host = bench.host_us(call) if num_bytes <= 64 * KIB else None
        report.row({**row, "host_us": host, "bus_bytes": bus_bytes(op, num_bytes, bench.size)})


def measure_apart(bench: Bench, report: Report, sizes: tuple[int, ...]) -> None:
    """The same result by `all_reduce`, then `rms_norm_quant`, each by the kernel that is selected."""
    for num_bytes in sizes:
        given = bench.operands("all_reduce_rms_norm", num_bytes)
        if given is None:
            continue
        x, residual, weight, eps = given.values()
        total = kernelhub.all_reduce.prepare(x, bench.group)
        norm = kernelhub.rms_norm_quant.prepare(x, weight, eps, residual, **bench.form)
        out = torch.empty_like(x)

        def call(total: Any = total, norm: Any = norm, given: Any = given, out: Any = out) -> None:
            x, residual, weight, eps = given.values()
            norm.run(total.run(x, out=out), weight, eps, residual, **_scales(bench.form), out_residual=residual)

        kernel = f"{total.kernel} + {norm.kernel}"
        graph = bench.graph_us(call) if bench.on_gpu else None
        row = {"op": "all_reduce, norm", "kernel": kernel, "bytes": num_bytes}
        row |= {"eager_us": bench.eager_us(call), "graph_us": graph}
        host = bench.host_us(call) if num_bytes <= 64 * KIB else None
        report.row({**row, "host_us": host, "bus_bytes": bus_bytes("all_reduce", num_bytes, bench.size)})


def _scales(form: dict[str, Any]) -> dict[str, Any]:
    """The scale that a format is given."""
    return {name: value for name, value in form.items() if name != "format"}


if __name__ == "__main__":
    main()
    sys.exit(0)
