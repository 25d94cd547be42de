"""Results of one run of `kernelhub.tune`: as text, as plain values, and as a table for other machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelhub.evidence.tuning.decide import FASTER, WORDS, Regret
from kernelhub.evidence.tuning.entry import MeasuredSize, TuningEntry
from kernelhub.evidence.tuning.tables import export
from kernelhub.probes.device import DeviceFacts


@dataclass(frozen=True)
class RegretRow:
    """Regret at one size of a problem class, relative to the fastest right kernel.

    Attributes:
        op: name of the op.
        facets: facets of the problem, without the device.
        regime: the op's name for the phase.
        tokens: tokens of the call.
        label: further properties of the call.
        best: the fastest kernel; best_us: its time in microseconds.
        chosen: the selected kernel, and its regret; None if it was not measured at this size.
        order: the kernel selected without measurements, and its regret with default sizes; None if it was not measured.
    """

    op: str
    facets: Mapping[str, Any]
    regime: str
    tokens: int
    label: str
    best: str
    best_us: float
    chosen: str
    chosen_regret: Regret | None
    order: str
    order_regret: Regret | None

    def to_dict(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if not name.endswith("_regret")}
        for name in ("chosen", "order"):
            found: Regret | None = getattr(self, f"{name}_regret")
            plain[f"{name}_regret"] = None if found is None else {"us": found.us, "percent": found.percent}
        return plain


@dataclass(frozen=True)
class LeftOut:
    """A problem class, size or kernel that was not measured, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class Tuning:
    """The measurements; `str` for people, `to_dict` for programs, `export` for other machines of this kind.

    Attributes:
        device: facts of the device that kernels ran on.
        entries: one for each measured problem class.
        left_out: problem classes, sizes and kernels that were not measured, each with the reason.
        wrong: (op, kernel) with a wrong result, each with its fault; their times are not used.
        unwritten: why results could not be stored on disk; empty if they were.
        unheeded: why selection does not read them; empty if it does.
        seconds: time of the run.
    """

    device: DeviceFacts
    entries: tuple[TuningEntry, ...]
    left_out: tuple[LeftOut, ...] = ()
    wrong: Mapping[tuple[str, str], str] = field(default_factory=dict)
    unwritten: str = ""
    unheeded: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether there are measurements and no kernel was wrong."""
        return bool(self.entries) and not self.wrong

    @property
    def regret(self) -> tuple[RegretRow, ...]:
        """One row for each size of each problem class, the order's largest regret first."""
        rows = [_row(entry, size) for entry in self.entries for size in entry.sizes if size.times]
        return tuple(sorted(rows, key=lambda row: -(row.order_regret.percent if row.order_regret else 0.0)))

    def export(self, path: str | Path) -> None:
        """Write the measurements as a table file, for `KERNELHUB_TUNED` on machines of this kind.

        Raises:
            ConfigurationError: the file is not writable.
        """
        export(Path(path), self.device, self.entries)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "ok": self.ok,
            "device": str(self.device),
            "seconds": round(self.seconds, 3),
            "unwritten": self.unwritten,
            "unheeded": self.unheeded,
            "wrong": [{"op": op, "kernel": kernel, "why": why} for (op, kernel), why in self.wrong.items()],
            "left_out": [vars(item) for item in self.left_out],
            "entries": [entry.to_dict() for entry in self.entries],
            "regret": [row.to_dict() for row in self.regret],
        }

    def summary(self) -> str:
        """The figures in a sentence."""
        rows = self.regret
        changed = sum(entry.word == FASTER for entry in self.entries)
        text = f"{len(self.entries)} problem classes, {len(rows)} sizes measured on {self.device}"
        if rows:
            text += f"; another kernel than the order's is faster for {changed}"
            text += f"; regret of the selections {_figures([row.chosen_regret for row in rows])}"
            text += f", of the order {_figures([row.order_regret for row in rows])}"
        return text + (f"; {len(self.left_out)} left out" if self.left_out else "")

    def __str__(self) -> str:
        lines = []
        for entry in self.entries:
            lines.append(f"{entry.op} ({entry.regime}): {entry.chosen}: {WORDS[entry.word]}")
            lines.append(f"    {entry.key}")
            for size in entry.sizes:
                times = sorted(size.times.items(), key=lambda item: item[1].us)
                times_text = ", ".join(f"{name} {item.us:.4g} us +- {item.noise_us:.2g}" for name, item in times)
                lines.append(f"    {size.label}: {times_text}")
        lines += [f"wrong: {op} {kernel}: {why}" for (op, kernel), why in self.wrong.items()]
        lines += [f"left out: {item.what}: {item.why}" for item in self.left_out]
        return "\n".join([*lines, self.summary(), *filter(None, (self.unwritten, self.unheeded))])


def _row(entry: TuningEntry, size: MeasuredSize) -> RegretRow:
    best = min(size.times, key=lambda name: size.times[name].us)
    best_us, first = size.times[best].us, entry.order[0] if entry.order else ""
    usual = size.times.get(first)
    usual_us = None if usual is None else usual.own_us or usual.us
    chosen = size.times.get(entry.chosen)
    return RegretRow(
        entry.op,
        dict(entry.facets),
        entry.regime,
        size.tokens,
        size.label,
        best,
        best_us,
        entry.chosen,
        None if chosen is None else _regret(chosen.us, best_us),
        first,
        None if usual_us is None else _regret(usual_us, best_us),
    )


def _regret(us: float, best_us: float) -> Regret:
    return Regret(us - best_us, 100.0 * (us - best_us) / best_us)


def _figures(regrets: list[Regret | None]) -> str:
    known = [item.percent for item in regrets if item is not None]
    if not known:
        return "is unknown"
    return f"{sum(known) / len(known):.1f} % on average and {max(known):.1f} % at most"
