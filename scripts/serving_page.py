"""The tables of README.md and docs/engines_measured.md from what `benchmarks/serving.py` measured of servers."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
ON_H100, ON_H200 = "serving_default_mode_h100.json", "serving_by_lengths_h200.json"
EXAMPLE = "serving_example_h200.json"
BACKENDS = {
    "CUSTOM": "kernelhub",
    "FLASH_ATTN": "FlashAttention-3",
    "FLASHINFER": "FlashInfer",
    "TRITON_ATTN": "Triton",
}
BESIDE = "kernelhub beside the best other"
FIRST_AND_NEXT = ("ttft_ms_p50", "itl_ms_p50")
WORKLOADS = ("1k/1k", "8k/1k", "1k/8k", "sharegpt")

Rows = list[dict[str, Any]]
Table = Callable[[tuple[str, ...], list[tuple[str, ...]]], str]


def cells(results: str) -> dict[tuple[str, int], dict[str, Rows]]:
    """Runs by (workload, clients) and backend, in the order of the tables."""
    found: dict[tuple[str, int], dict[str, Rows]] = {}
    for row in json.loads((RESULTS / results).read_text())["rows"]:
        if "client" in row or row["backend"] not in BACKENDS:  # a check of the client, kernelhub with a switch off
            continue
        found.setdefault((row["workload"], row["concurrency"]), {}).setdefault(row["backend"], []).append(row)
    by_load = sorted(found, key=lambda cell: (WORKLOADS.index(cell[0]), cell[1]))
    return {cell: {name: found[cell][name] for name in BACKENDS if name in found[cell]} for cell in by_load}


def throughput(table: Table, results: str) -> str:
    """Output tokens/s by cell and backend, the best bold, and how much more kernelhub has than the best other."""
    found, rows = cells(results), []
    names = [name for name in BACKENDS if any(name in backends for backends in found.values())]
    for (load, clients), backends in found.items():
        values = {name: median(runs, "output_tokens_per_s") for name, runs in backends.items()}
        shown = [mark(values[name], max(values.values()), digits=4) if name in values else "" for name in names]
        others = max(value for name, value in values.items() if name != "CUSTOM")
        rows.append((f"{load}, {clients}", *shown, f"{100 * (values['CUSTOM'] / others - 1):+.1f} %"))
    return table(("input/output tokens, clients", *(BACKENDS[name] for name in names), BESIDE), rows)


def at_once(table: Table, results: str, machine: int) -> str:
    """Output tokens/s of the servers of one machine, each on a GPU of its own, where kernelhub's ran."""
    rows = []
    for (load, clients), backends in cells(results).items():
        speeds = {
            name: [row["output_tokens_per_s"] for row in runs if row.get("machine") == machine]
            for name, runs in backends.items()
        }
        if speeds.get("CUSTOM"):
            best = max(max(runs, default=0.0) for runs in speeds.values())
            others = max(max(runs, default=0.0) for name, runs in speeds.items() if name != "CUSTOM")
            shown = [" and ".join(mark(speed, best, digits=4) for speed in speeds.get(name, [])) for name in BACKENDS]
            rows.append((f"{load}, {clients}", *shown, f"{100 * (min(speeds['CUSTOM']) / others - 1):+.1f} %"))
    return table(("input/output tokens, clients", *BACKENDS.values(), BESIDE), rows)


def example(table: Table, results: str, beside: str) -> str:
    """The example server beside vLLM's servers: output tokens/s, TTFT and ITL by cell."""
    others, rows = cells(beside), []
    own: dict[tuple[str, int], Rows] = {}
    for row in json.loads((RESULTS / results).read_text())["rows"]:
        own.setdefault((row["workload"], row["concurrency"]), []).append(row)
    for cell, backends in others.items():
        speeds = {name: median(runs, "output_tokens_per_s") for name, runs in backends.items()}
        mine = median(own[cell], "output_tokens_per_s")
        two = own[cell], backends["CUSTOM"]
        rows.append(
            (
                f"{cell[0]}, {cell[1]}",
                f"{mine:.4g}",
                *(f"{speeds[name]:.4g}" for name in BACKENDS),
                f"{100 * (mine / speeds['CUSTOM'] - 1):+.1f} %",
                *(" / ".join(mark(median(runs, figure), math.inf) for runs in two) for figure in FIRST_AND_NEXT),
            )
        )
    header = ("input/output tokens, clients", "example", *(f"vLLM, {name}" for name in BACKENDS.values()))
    return table((*header, "example beside vLLM with kernelhub", "TTFT p50, ms", "ITL p50, ms"), rows)


def rows_by_backend(results: str) -> dict[str, Any]:
    """The results of the backends alone, by their names in the tables and in their order."""
    by_cell = cells(results)
    rows = [
        {**row, "backend": BACKENDS[name]}
        for backends in by_cell.values()
        for name in backends
        for row in backends[name]
    ]
    return {**json.loads((RESULTS / results).read_text()), "rows": rows}


def latencies(table: Table, results: str) -> str:
    """Every figure, with runs and spread."""
    rows = []
    for (load, clients), backends in cells(results).items():
        best = {
            figure: min(median(runs, figure) for runs in backends.values())
            for figure in ("ttft_ms_p50", "itl_ms_p50", "tpot_ms_p50")
        }
        most = max(median(runs, "output_tokens_per_s") for runs in backends.values())
        for at, (name, runs) in enumerate(backends.items()):
            speeds = [row["output_tokens_per_s"] for row in runs]
            spread = f" ({100 * (max(speeds) - min(speeds)) / median(runs, 'output_tokens_per_s'):.1f} %)"
            at_99 = median(runs, "itl_ms_p99")
            itl = mark(median(runs, "itl_ms_p50"), best["itl_ms_p50"])
            rows.append(
                (
                    f"{load}, {clients}" if at == 0 else "",
                    BACKENDS[name],
                    str(len(runs)),
                    mark(median(runs, "ttft_ms_p50"), best["ttft_ms_p50"]),
                    itl if math.isinf(at_99) else f"{itl} ({at_99:.1f})",
                    mark(median(runs, "tpot_ms_p50"), best["tpot_ms_p50"]),
                    mark(median(runs, "output_tokens_per_s"), most, digits=4) + (spread if len(runs) > 1 else ""),
                    f"{median(runs, 'dollars_per_million_output_tokens'):.3f}",
                )
            )
    header = ("input/output tokens, clients", "", "runs", "TTFT p50, ms", "ITL p50 (p99), ms", "TPOT p50, ms")
    return table((*header, "output tokens/s (spread)", "$ per million"), rows)


def median(runs: Rows, figure: str) -> float:
    """Of the runs that have the figure: of some, tokens/s alone were kept. Infinite if none has it."""
    return float(statistics.median([row[figure] for row in runs if figure in row] or [math.inf]))


def mark(value: float, best: float, digits: int = 3) -> str:
    """To so many digits; bold if it shows as the best does. A dash for what no run has."""
    if math.isinf(value):
        return "-"
    text, of_best = (f"{number:.{digits}g}" if number < 10**digits else f"{number:.0f}" for number in (value, best))
    return f"**{text}**" if text == of_best else text
