"""The picture of the README: per op, the time of the selected kernel relative to the fastest call of plain torch.

It is drawn from benchmarks/results without a plotting library, so the file is small and equal on every machine.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
BENCHMARKS = ("attention", "mla", "gemm", "grouped_gemm", "moe", "indexer", "quant")
BLACK, GREY = "#1f2933", "#52606d"
TICKS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LABELS, PLOT, COUNTS, ROW, TOP = 190, 440, 170, 26, 84  # pixels


@dataclass(frozen=True)
class Ratios:
    """The selected kernel's time over that of torch's fastest call, for every case of an op."""

    op: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Geometric mean."""
        return math.exp(sum(map(math.log, self.values)) / len(self.values))


def ratios(machine: str) -> tuple[list[Ratios], dict[str, Any]]:
    """Per op, best first, with the head of one result file. Cases that plain torch cannot run are left out."""
    found: dict[str, list[float]] = {}
    head: dict[str, Any] = {}
    for name in BENCHMARKS:
        path = RESULTS / f"{name}_{machine}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        head = head or {key: result[key] for key in ("device", "torch", "date")}
        for row in result["rows"]:
            if row["torch_ms"]:
                ms = row["kernels_ms"][row["chosen"]]
                found.setdefault(row["op"], []).append(ms / min(row["torch_ms"].values()))
    return sorted((Ratios(op, tuple(values)) for op, values in found.items()), key=lambda each: each.mean), head


def picture(machine: str) -> str:
    """The picture as SVG: a bar to the geometric mean, a line from the best case to the worst."""
    rows, head = ratios(machine)
    width, height = LABELS + PLOT + COUNTS, TOP + ROW * len(rows) + 48
    low, high = math.log(TICKS[0] * 0.72), math.log(max(TICKS[-1], *(max(row.values) for row in rows)) * 1.15)

    def x(ratio: float) -> float:
        return LABELS + PLOT * (math.log(ratio) - low) / (high - low)

    bottom = TOP + ROW * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold" fill="{BLACK}">Time of the selected kernel relative to '
        "the fastest call of plain torch</text>",
        f'<text x="12" y="44" fill="{GREY}">{head["device"]}, torch {head["torch"]}, {head["date"]}. Left of 1 is '
        "faster.</text>",
        f'<text x="12" y="62" fill="{GREY}">Bar: geometric mean of the cases; line: best to worst case; within 2 % '
        "counts as equal.</text>",
    ]
    for tick in TICKS:
        colour = "#1f2933" if tick == 1 else "#d2d6dc"
        lines.append(
            f'<line x1="{x(tick):.1f}" y1="{TOP - 6}" x2="{x(tick):.1f}" y2="{bottom}" stroke="{colour}"/>'
            f'<text x="{x(tick):.1f}" y="{bottom + 18}" text-anchor="middle" fill="#52606d">{tick:g}</text>'
        )
    for place, row in enumerate(rows):
        middle = TOP + ROW * place + ROW / 2
        colour = "#2f855a" if row.mean < 0.98 else "#c05621" if row.mean > 1.02 else "#718096"
        left, right = sorted((x(row.mean), x(1.0)))
        won = sum(value < 0.98 for value in row.values)
        lost = sum(value > 1.02 for value in row.values)
        lines += [
            f'<text x="{LABELS - 8}" y="{middle + 4:.0f}" text-anchor="end" fill="#1f2933">{row.op}</text>',
            f'<rect x="{left:.1f}" y="{middle - 7:.0f}" width="{max(right - left, 2):.1f}" height="14" '
            f'fill="{colour}"/>',
            f'<line x1="{x(min(row.values)):.1f}" y1="{middle:.0f}" x2="{x(max(row.values)):.1f}" y2="{middle:.0f}" '
            'stroke="#1f2933"/>',
            f'<text x="{LABELS + PLOT + 8}" y="{middle + 4:.0f}" fill="{GREY}">{row.mean:.2f}; '
            f"{won} won, {lost} lost</text>",
        ]
    middle_of_plot = LABELS + PLOT / 2
    lines += [
        f'<text x="{middle_of_plot:.0f}" y="{bottom + 38}" text-anchor="middle" fill="#52606d">'
        "time of kernelhub / time of torch (log scale)</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
