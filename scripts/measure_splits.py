"""Time paged decode by `triton.split_kv` with different tiles and numbers of parts, on the GPU that is here.

    python scripts/measure_splits.py [--seconds 120] [--fp8] [--mixed | --rule [--keys 1024,2048]] [--out results.json]

The rule that selects both, `kernelhub/backends/triton/attention/splits.py`, was fitted to such times. Calls are timed
in CUDA graphs of ten. Of every batch the table shows what the rule selects, its time over that of the best of those
tried, and the best. With `--mixed` the sequences of a batch have the lengths that a server holds at a moment, and the
table of pages has room for `MIXED_ROOM` tokens of each.

`--rule` compares what is selected with the numbers of parts that the host gives without the lengths
(`kernelhub/backends/triton/attention/balanced.py`), both in one launch, and with the time that reading the keys takes
at the speed of a sum over 4 GB: for Llama 3.1 8B, caches of bfloat16 and of float8_e4m3fn, batches of the lengths of a
server and of equal ones, block tables with room for as much as the longest, and for more. Rooms that give the same are
measured once. Before it is timed a result is compared with the host's. In 150 seconds it measures all of them;
`--keys` leaves equal lengths alone, of so many keys.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import random
import statistics
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton

import kernelhub
from kernelhub.backends.triton.attention import adapter as adapters
from kernelhub.backends.triton.attention.adapter import SplitKV
from kernelhub.backends.triton.attention.splits import Division
from kernelhub.backends.triton.attention.tiles import Tiles
from kernelhub.ops.attention.inputs import paged_attention_inputs
from kernelhub.ops.models.shapes import ATTENTION, AttentionModel

SHAPES = {
    "llama-3.1-8b": ATTENTION["llama-3.1-8b"],
    "llama-3.1-70b on 8 GPUs": AttentionModel("", 8, 1, 128, 128),
    "64 heads to 8 of 64": AttentionModel("", 64, 8, 64, 64),
    "16 heads to 8 of 256": AttentionModel("", 16, 8, 256, 256),
    "32 heads to 2 of 128": AttentionModel("", 32, 2, 128, 128),
}
BATCHES = (
    *((size, 4096) for size in (1, 4, 8, 16, 24, 32, 48, 64, 96)),
    *((128, 2048), (256, 2048), (64, 1024), (8, 16384)),
)
PARTS = (1, 2, 3, 4, 5, 6, 8, 11, 12, 16, 24, 33)
MIXED = (8, 32, 64, 128, 256)
MIXED_ROOM = 9472
MOST_PROGRAMS = 4096  # more parts than fill the device many times over are not worth their time


def graph_ms(call: Callable[[], Any], calls: int = 10) -> float:
    """Milliseconds of one call in a graph of `calls`: the median of rounds."""
    return times_of([graph_of(call, calls)], calls)[0]


def graph_of(call: Callable[[], Any], calls: int) -> torch.cuda.CUDAGraph:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def times_of(graphs: Sequence[torch.cuda.CUDAGraph], calls: int, rounds: int = 11) -> list[float]:
    """Milliseconds of a call of each graph, which are replayed in turn: the medians of rounds."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for graph, found in zip(graphs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) / calls)
    return [statistics.median(found) for found in times]


def resident(count: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of sequences that a server of requests like ShareGPT's holds at a moment.

    Prompts and outputs are log-normal, as `benchmarks/serving.py` draws them. A request is held as long as its output
    takes, and is seen at any of its tokens.
    """
    draw = random.Random(seed)
    requests = [
        tuple(int(min(max(draw.lognormvariate(math.log(m), s), 4), 2048)) for m, s in ((110, 1.3), (130, 1.0)))
        for _ in range(4000)
    ]
    held = draw.choices(requests, weights=[output for _, output in requests], k=count)
    return tuple(prompt + 1 + draw.randrange(output) for prompt, output in held)


EQUAL = (32, 104, 24, 64, 112, 16, 40, 56, 128, 200, 8, 48, 96, 152, 80, 256, 1)
RULED = (
    *(resident(count) for count in MIXED),
    *((keys,) * count for keys in (8192, 1024, 4096, 2048, 16384) for count in EQUAL),
)
ROOMS = (0, MIXED_ROOM, 32768)
HEADS, KERNEL = SHAPES["llama-3.1-8b"], "triton.split_kv"


def _named(division: Division) -> str:
    """``KEYS.WARPS.STAGES/PARTS``, ``+SHARES`` where lengths share keys out."""
    tiles, parts, shares = division[:3]
    return f"{tiles.block_n}.{tiles.num_warps}.{tiles.num_stages}/{parts}" + (f"+{shares}" if shares else "")


def arguments_of(model: AttentionModel, lengths: tuple[int, ...], room: int, fp8: bool) -> dict[str, Any]:
    """A call of sequences of these lengths, whose rows of the block table have room for so many tokens."""
    device = torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(0)
    inputs = {"kv_dtype": torch.float8_e4m3fn} if fp8 else {}
    arguments = paged_attention_inputs(model, seq_lens=lengths, device=device, generator=generator, **inputs)
    table = arguments["block_table"]
    arguments["block_table"] = table.new_zeros(len(lengths), -(-room // 16))
    arguments["block_table"][:, : table.shape[1]] = table
    return arguments


def measure_rule(until: float, batches: Sequence[tuple[int, ...]] = RULED) -> list[dict[str, Any]]:
    """Times in ms of the host's parts, of what is selected, and of reading; "error" is the largest difference."""
    memory = torch.ones(1 << 30, device="cuda")
    bytes_per_ms = memory.nbytes / graph_ms(functools.partial(torch.sum, memory), calls=2)
    most = max(sum(-(-length // 16) for length in lengths) for lengths in batches)
    caches = {dtype: [_drawn(most, dtype) for _ in range(2)] for dtype in (torch.bfloat16, torch.float8_e4m3fn)}
    rows: list[dict[str, Any]] = []
    for lengths, dtype in itertools.product(batches, caches):
        for (host, rule), room, rooms in divisions_of(lengths, *caches[dtype]):
            if time.monotonic() > until:
                return rows
            arguments = paged(lengths, room, *caches[dtype])
            calls = min(10, max(2, 1_000_000 // sum(lengths)))
            outs, graphs = [], []
            for division in dict.fromkeys((host, rule)):
                outs.append(torch.empty_like(arguments["q"]))
                call = functools.partial(kernelhub.paged_attention, **arguments, out=outs[-1], backend=KERNEL)
                with dividing(division):
                    graphs.append(graph_of(call, calls))
            times = [round(ms, 5) for ms in times_of(graphs, calls, rounds=21)]
            reading = sum(lengths) * HEADS.num_kv_heads * 256 * dtype.itemsize / bytes_per_ms
            error = (outs[0].float() - outs[-1].float()).abs().nan_to_num(torch.inf).max().item()
            row = {"sequences": len(lengths), "rooms": rooms, "kv_dtype": str(dtype).removeprefix("torch.")}
            row |= {"total_keys": sum(lengths), "longest": max(lengths), "host": _named(host), "rule": _named(rule)}
            row |= {"host_ms": times[0], "rule_ms": times[-1], "reading_ms": round(reading, 5)}
            rows.append(row | {"error": round(error, 5)})
            label = f"{row['kv_dtype']:14} {len(lengths):4} of {sum(lengths):7}, longest {max(lengths):5}, room {rooms}"
            over = f"{times[-1] / times[0]:.3f} of {times[0]} ms, {times[-1] / reading:.2f} of reading"
            print(f"{label}: {_named(host)} -> {_named(rule)}: {over}, error {error:.4f}", flush=True)
    return rows


def divisions_of(
    lengths: tuple[int, ...], k_cache: torch.Tensor, v_cache: torch.Tensor
) -> list[tuple[tuple[Division, Division], int, list[int]]]:
    """What the host gives and what is selected, for a room of the block table, and all rooms for which these are so."""
    arguments = paged(lengths, max(lengths), k_cache, v_cache)
    problem = kernelhub.explain("paged_attention", **arguments, backend=KERNEL).problem
    found: dict[tuple[Division, Division], list[int]] = {}
    for room in sorted({max(max(lengths), room) for room in ROOMS}):
        both = []
        for balance in (False, True):
            with unittest.mock.patch.object(adapters, "BALANCE", balance):
                both.append(SplitKV(problem).divide(len(lengths), HEADS.num_q_heads // HEADS.num_kv_heads, room))
        found.setdefault((both[0], both[1]), []).append(room)
    return [(both, rooms[0], rooms) for both, rooms in found.items()]


def paged(lengths: tuple[int, ...], room: int, k_cache: torch.Tensor, v_cache: torch.Tensor) -> dict[str, Any]:
    """A call of sequences whose pages, in random order, are the first of a cache."""
    pages = [-(-length // 16) for length in lengths]
    table = torch.zeros(len(lengths), -(-room // 16), dtype=torch.int32, device="cuda")
    for row, named in zip(table, torch.randperm(sum(pages), device="cuda").int().split(pages), strict=True):
        row[: len(named)] = named
    return {
        "q": torch.randn(len(lengths), HEADS.num_q_heads, 128, device="cuda").bfloat16(),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": table,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        **({"k_scale": 0.02, "v_scale": 0.02} if k_cache.itemsize == 1 else {}),
    }


@contextlib.contextmanager
def dividing(division: Division) -> Iterator[None]:
    """Calls within divide the keys so."""
    patch = unittest.mock.patch.object
    with patch(SplitKV, "divide", lambda *_: division), patch(adapters, "BALANCE", division.shares > 0):
        kernelhub.paged_attention.op._forget()
        yield
    kernelhub.paged_attention.op._forget()


def _drawn(pages: int, dtype: torch.dtype) -> torch.Tensor:
    """Pages of 16 tokens, 8 heads of 128."""
    drawn = torch.empty(pages, 16, 8, 128, dtype=dtype, device="cuda")
    for part in drawn.split(1 << 14):
        values = torch.randn(part.shape, device="cuda", dtype=torch.bfloat16)
        part.copy_(values if dtype.itemsize == 2 else values * 50)
    return drawn


def measure_parts(options: argparse.Namespace, until: float) -> list[dict[str, Any]]:
    """Times in ms of the rule and of other tiles and numbers of parts."""
    usual, rows = SplitKV.divide, []
    batches = [(n, (n,) * b) for b, n in BATCHES]
    shapes = SHAPES
    if options.mixed:
        batches, shapes = [(MIXED_ROOM, resident(b)) for b in MIXED], {"llama-3.1-8b": SHAPES["llama-3.1-8b"]}
    for (tokens, lengths), (name, model) in itertools.product(batches, shapes.items()):
        sequences = len(lengths)
        if time.monotonic() > until:
            break
        SplitKV.divide = usual
        arguments = arguments_of(model, lengths, tokens, options.fp8)

        def call(arguments: dict[str, Any] = arguments) -> None:
            kernelhub.paged_attention(**arguments, backend="triton.split_kv")

        def timed(division: Division | None, call: Callable[[], None] = call) -> float:
            SplitKV.divide = usual if division is None else lambda *_: division
            kernelhub.paged_attention.op._forget()
            return round(graph_ms(call), 5)

        problem = kernelhub.explain("paged_attention", **arguments, backend="triton.split_kv").problem
        adapter = SplitKV(problem)
        rule = adapter.divide(sequences, model.num_q_heads // model.num_kv_heads, tokens)
        row: dict[str, Any] = {"heads": name, "sequences": sequences, "keys": tokens, "rule": _named(rule)}
        row |= {"total_keys": sum(lengths), "longest": max(lengths)} if options.mixed else {}
        row["rule_ms"], row["ms"] = timed(None), {}
        kinds = [kind.tiles for kind in adapter._kinds] + [
            Tiles(16, *map(int, tiles.split("."))) for tiles in options.tiles
        ]
        for tiles in dict.fromkeys([rule.tiles, *kinds]):
            for parts in PARTS:
                if parts == 1 or (parts * 256 <= tokens and parts * sequences * model.num_kv_heads < MOST_PROGRAMS):
                    division = Division(tiles, parts)
                    row["ms"][_named(division)] = timed(division)
        rows.append(row)
        best = min(row["ms"], key=row["ms"].get)
        regret = row["rule_ms"] / row["ms"][best]
        label = f"{name:24} {sequences:4} x {tokens:6}"
        print(f"{label}: {row['rule']:12} {row['rule_ms']} ms, {regret:.3f} of the best, {best}", flush=True)
    SplitKV.divide = usual
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fp8", action="store_true", help="a cache of float8_e4m3fn")
    parser.add_argument("--mixed", action="store_true", help="sequences of different lengths, Llama 3.1 8B")
    parser.add_argument("--rule", action="store_true", help="what is selected, the host's parts, and reading")
    parser.add_argument("--keys", help="with --rule: of sequences of equal lengths, such as 1024,2048")
    parser.add_argument("--tiles", nargs="*", default=[], metavar="KEYS.WARPS.STAGES", help="also other tiles")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    batches = RULED
    if options.keys:
        batches = tuple((int(keys),) * count for keys in options.keys.split(",") for count in EQUAL)
    rows = measure_rule(until, batches) if options.rule else measure_parts(options, until)
    if options.out:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        dtypes = {"dtype": "bfloat16"}
        if not options.rule:
            dtypes["kv_dtype"] = "float8_e4m3fn" if options.fp8 else "bfloat16"
        result = {**facts, "date": date.today().isoformat(), **dtypes, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
