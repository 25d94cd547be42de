"""Plots of the collectives for the documentation site: times by the size of a message, or the tokens of a rank."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SUMS = ("comm_norm_h200", "comm_4_ranks_h200", "comm_h100")  # results of benchmarks/comm.py
EXPERTS = ("expert_comm_h200", "expert_comm_4_ranks_h200")  # of benchmarks/expert_comm.py
LABELS = {1 << 10: "1 KB", 1 << 13: "8 KB", 1 << 16: "64 KB", 1 << 20: "1 MB", 1 << 23: "8 MB", 1 << 28: "256 MB"}
Lines = dict[str, list[tuple[int, float]]]


def pages() -> tuple[list[str], dict[str, str]]:
    """Sections of the page, and their pictures by their paths on the site."""
    parts, made = [], {}
    for name in (*SUMS, *EXPERTS):
        result = json.loads((RESULTS / f"{name}.json").read_text())
        machine = f"{result['ranks']} {result['device']}, torch {result['torch']}, {result['date']}"
        for op, lines in (lines_of_sums(result) if name in SUMS else lines_of_experts(result)).items():
            path = f"performance/{op}_{name}.svg"
            made[path] = plot(lines, "bytes of a message" if name in SUMS else "tokens of a rank")
            what = "moe_dispatch and moe_combine" if op == "moe_dispatch" else op
            parts.append(
                f"### {what} on {result['ranks']} {result['device']}\n\n{machine}. Microseconds of a call in a CUDA "
                f"graph on the slowest rank.\n\n![times of {what} by kernel]({Path(path).name})"
            )
    return parts, made


def lines_of_sums(result: dict[str, Any]) -> dict[str, Lines]:
    """By op, for each kernel, bytes and microseconds."""
    found: dict[str, Lines] = {}
    for row in result["rows"]:
        if row["graph_us"] and row["op"].startswith("all_reduce") and not row.get("format"):
            found.setdefault(row["op"], {}).setdefault(row["kernel"], []).append((row["bytes"], row["graph_us"]))
    return found


def lines_of_experts(result: dict[str, Any]) -> dict[str, Lines]:
    """For each pair of kernels, tokens of a rank and microseconds of a dispatch and a combine, in format tokens."""
    lines: Lines = {}
    for row in result["results"]:
        alike = (row["model"], row["dtype"], row["format"]) == ("deepseek-v3.2", "bfloat16", "tokens")
        if alike and row.get("both_graph_us"):
            pair = row["dispatch"] if row["dispatch"] == row["combine"] else f"{row['dispatch']}, {row['combine']}"
            lines.setdefault(pair, []).append((row["tokens"], row["both_graph_us"]))
    return {"moe_dispatch": lines}


def plot(lines: Lines, about: str) -> str:
    """A line for each kernel, both axes logarithmic."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kernelhub", "font.size": 8})
    figure = Figure(figsize=(7.2, 3.4))
    axes = figure.add_axes((0.09, 0.14, 0.52, 0.8))
    for place, (kernel, points) in enumerate(sorted(lines.items())):
        axes.plot(
            *zip(*sorted(points), strict=True), marker="o", markersize=3, linewidth=1, color=f"C{place}", label=kernel
        )
    sizes = sorted({size for points in lines.values() for size, _ in points})
    shown = [size for size in sizes if size in LABELS] if about.startswith("bytes") else sizes
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(shown, [LABELS.get(size, str(size)) if about.startswith("bytes") else str(size) for size in shown])
    axes.minorticks_off()
    axes.grid(color="#e2e8f0")
    axes.set_xlabel(about)
    axes.set_ylabel("microseconds (log scale)")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()
