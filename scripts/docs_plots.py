"""The page of plots of the documentation site: SVG files that matplotlib draws from benchmarks/results."""

from __future__ import annotations

import io
import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import comm_plots
import relative_time
import serving_page

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MACHINES = {"h200": "NVIDIA H200", "two_threads_epyc": "two cores of an EPYC"}
COLOURS = {"selected": "#2f855a", "torch": "#c05621", "other": "#a0aec0"}


def pages() -> dict[str, str]:
    """The page and its pictures, by their paths on the site."""
    made: dict[str, str] = {}
    parts = [
        "# Performance plots",
        "Every figure comes from `benchmarks/results`. [Measurements](../measured.md) has the tables with all numbers. "
        "It also says how they were measured and where kernelhub loses.",
    ]
    for machine, title in MACHINES.items():
        made[f"performance/relative_time_{machine}.svg"] = relative_time.picture(machine)
        parts.append(f"## {title}\n\n![relative time per op on {title}](relative_time_{machine}.svg)")
        for op, rows, head in _per_op(machine):
            name = f"{op}_{machine}.svg"
            made[f"performance/{name}"] = plot(rows)
            parts.append(
                f"### {op} on {title}\n\n{head['device']}, torch {head['torch']}, {head['date']}. A value of 1 is the "
                "hardware bound: the least time that memory traffic or arithmetic takes at the rates measured on the "
                f"same machine.\n\n![time over the hardware bound of {op}]({name})"
            )
    made["performance/serving_h200.svg"], machine = serving_plot()
    parts.append(
        f"## Serving on an H200\n\n{machine}. vLLM's backends. A bar is the median of the runs, a line spans them. "
        "[Serving engines, measured](../engines_measured.md) says how these were measured.\n\n"
        "![tokens per second and latencies of serving](serving_h200.svg)"
    )
    sections, pictures = comm_plots.pages()
    parts += ["## Ranks", *sections]
    made |= pictures
    made["performance/plots.md"] = "\n\n".join(parts) + "\n"
    return made


def plot(rows: list[dict[str, Any]]) -> str:
    """Times over the hardware bound, a line for each case: the selected kernel, torch's best, other kernels."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kernelhub", "font.size": 8})
    # Fixed margins, in inches: a layout that measures them would draw everything twice.
    labels_wide, height = 0.066 * max(len(row["case"]) for row in rows) + 0.2, 0.2 * len(rows)
    width, above, below = labels_wide + 5.2, 0.35, 0.55
    figure = Figure(figsize=(width, above + height + below))
    axes = figure.add_axes(
        (labels_wide / width, below / (above + height + below), 5.0 / width, height / (above + height + below))
    )
    points: dict[str, list[tuple[float, int]]] = {"other": [], "torch": [], "selected": []}
    for place, row in enumerate(rows):
        roof = row["roof_ms"]
        for kernel, ms in row["kernels_ms"].items():
            points["selected" if kernel == row["chosen"] else "other"].append((ms / roof, place))
        if row["torch_ms"]:
            points["torch"].append((min(row["torch_ms"].values()) / roof, place))
    labels = {"selected": "selected kernel", "torch": "fastest call of plain torch", "other": "other kernels"}
    for kind, found in points.items():
        axes.scatter(*zip(*found, strict=True), s=14, color=COLOURS[kind], label=labels[kind]) if found else None
    axes.set_xscale("log")
    axes.axvline(1.0, color="#1f2933", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["case"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x", color="#e2e8f0")
    axes.set_xlabel("time / hardware bound (log scale; left is faster)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def serving_plot() -> tuple[str, str]:
    """The picture of benchmarks/serving.py for its results, and the machine that gave them."""
    import matplotlib as mpl

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kernelhub", "font.size": 8})
    results = serving_page.rows_by_backend(serving_page.ON_H200)
    written = io.StringIO()
    sys.path.insert(0, str(RESULTS.parent))  # serving.py imports modules beside it
    runpy.run_path(str(RESULTS.parent / "serving.py"))["picture"](results).savefig(
        written, format="svg", metadata={"Date": None}
    )
    head = results["machine"]
    return written.getvalue(), f"{head['device']}, torch {head['torch']}, {head['date']}, vLLM {head['vllm']}"


def _per_op(machine: str) -> list[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
    """(op, cases, head of the result file), in the order of the benchmarks."""
    found: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {}
    for name in relative_time.BENCHMARKS:
        path = RESULTS / f"{name}_{machine}.json"
        if path.exists():
            result = json.loads(path.read_text())
            for row in result["rows"]:
                if math.isfinite(row["roof_ms"]) and row["roof_ms"] > 0:
                    found.setdefault(row["op"], ([], result))[0].append(row)
    return [(op, rows, head) for op, (rows, head) in found.items()]
