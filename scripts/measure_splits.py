"""Time paged decode by `triton.split_kv` with different tiles and numbers of parts, on the GPU that is here.

    python scripts/measure_splits.py [--seconds 120] [--fp8] [--mixed | --shared] [--out results.json]

The rule that selects both, `kernelhub/backends/triton/attention/splits.py`, was fitted to such times. Calls are timed
in CUDA graphs of ten. Of every batch the table shows what the rule selects, its time over that of the best of those
tried, and the best. With `--mixed` the sequences of a batch have the lengths that a server holds at a moment, and the
table of pages has room for `MIXED_ROOM` tokens of each.

`--shared` compares what the lengths share out (`kernelhub/backends/triton/attention/balanced.py`) with the numbers of
parts that the host gives without that, for Llama 3.1 8B: batches of the lengths of a server, then those of equal
lengths, each with caches of bfloat16 and of float8_e4m3fn. Before it is timed a result is compared with the host's.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable
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


def graph_ms(call: Callable[[], Any], calls: int = 10, rounds: int = 11) -> float:
    """Milliseconds of one call in a graph of `calls`: the median of rounds."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times)


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


def _named(division: Division, one_launch: bool = False) -> str:
    """``KEYS.WARPS.STAGES/PARTS``, ``+SHARES`` where lengths share keys out, `` once`` where one launch merges, too."""
    tiles, parts, shares = division
    name = f"{tiles.block_n}.{tiles.num_warps}.{tiles.num_stages}/{parts}"
    return name + (f"+{shares}" if shares else "") + (" once" if one_launch else "")


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


def measure_shared(until: float) -> list[dict[str, Any]]:
    """Times in ms, by division, of the host's rule and of shares; "error" is the largest difference of results."""
    model, usual, chosen = SHAPES["llama-3.1-8b"], SplitKV.divide, (adapters.BALANCE, adapters.ONE_LAUNCH)
    rows: list[dict[str, Any]] = []
    mixed = [(MIXED_ROOM, resident(count)) for count in MIXED]
    equal = [(keys, (keys,) * count) for count, keys in BATCHES] + [(MIXED_ROOM, (700,) * 128)]
    for (room, lengths), fp8 in [*itertools.product(mixed, (False, True)), *itertools.product(equal, (False, True))]:
        if time.monotonic() > until:
            break
        arguments, count = arguments_of(model, lengths, room, fp8), len(lengths)
        problem = kernelhub.explain("paged_attention", **arguments, backend="triton.split_kv").problem
        rule = {}
        for adapters.BALANCE in (False, True):
            adapter = SplitKV(problem)
            rule[adapters.BALANCE] = usual(adapter, count, model.num_q_heads // model.num_kv_heads, room)
        host, shared = rule[False], rule[True]
        row: dict[str, Any] = {"sequences": count, "room": room, "kv_dtype": problem.kv_dtype}
        row |= {"total_keys": sum(lengths), "longest": max(lengths), "host": _named(host), "rule": _named(shared)}
        row |= {"ms": {}, "error": 0.0}
        tried = list(itertools.product((host, shared), (False, True)))
        if len(set(lengths)) > 1:
            for kind in adapter._kinds:
                filling = kind.programs * problem.device.num_sms / model.num_kv_heads
                for rounds in (1, 1.5, 2, 3, 4):
                    tried.append((Division(kind.tiles, host.parts, int(filling * rounds)), True))
        want = None
        for division, one_launch in dict.fromkeys(tried):
            SplitKV.divide = lambda *_, division=division: division
            adapters.BALANCE, adapters.ONE_LAUNCH = division.shares > 0, one_launch
            kernelhub.paged_attention.op._forget()
            out = kernelhub.paged_attention(**arguments, backend="triton.split_kv").float()
            want = out if want is None else want
            row["error"] = max(row["error"], (out - want).abs().nan_to_num(torch.inf).max().item())
            call = functools.partial(kernelhub.paged_attention, **arguments, backend="triton.split_kv")
            row["ms"][_named(division, one_launch)] = round(graph_ms(call), 5)
        SplitKV.divide, (adapters.BALANCE, adapters.ONE_LAUNCH) = usual, chosen
        rows.append(row)
        best = min(row["ms"], key=row["ms"].get)
        label = f"{problem.kv_dtype:14} {count:4} of {sum(lengths):7}, room {room:6}"
        times = [row["ms"][_named(*one)] for one in itertools.product((host, shared), (False, True))]
        over = ", ".join(f"{time / times[0]:.3f}" for time in times[1:])
        print(f"{label}: {_named(host):12} {times[0]} ms; once, {_named(shared)} twice, once: {over};", end=" ")
        print(f"best {best} {row['ms'][best]} ms, error {row['error']:.4f}", flush=True)
    return rows


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
    parser.add_argument("--shared", action="store_true", help="shares by the lengths against the host's parts")
    parser.add_argument("--tiles", nargs="*", default=[], metavar="KEYS.WARPS.STAGES", help="also other tiles")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    rows = measure_shared(until) if options.shared else measure_parts(options, until)
    if options.out:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        dtypes = {"dtype": "bfloat16"}
        if not options.shared:
            dtypes["kv_dtype"] = "float8_e4m3fn" if options.fp8 else "bfloat16"
        result = {**facts, "date": date.today().isoformat(), **dtypes, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
