"""What one run of `kernelhub.tune` measured: for people, for machines, and as a table to carry elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelhub.evidence.tuning.decide import FASTER, WORDS, Regret
from kernelhub.evidence.tuning.entry import Entry, Size
from kernelhub.evidence.tuning.tables import export
from kernelhub.probes.device import DeviceFacts


@dataclass(frozen=True)
class RegretRow:
    """What choices cost at one size of a problem class, beside the fastest kernel that was right.

    Attributes:
        op: name of the op.
        facets: of the problem, without the device.
        regime: the op's name for the phase.
        tokens: of the call.
        label: what else is said of it.
        best: the fastest kernel; best_us: its time in microseconds.
        chosen: the kernel that is chosen from now on, and its regret; None if it was not measured at this size.
        order: the kernel that is chosen without measurements, and its regret with its own sizes; None if it was not
            measured.
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
    """Something that was not measured, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class Tuning:
    """What was measured; `str` for people, `to_dict` for machines, `export` for other machines of this kind.

    Attributes:
        device: facts of the device that kernels ran on.
        entries: one for each problem class that was measured.
        left_out: problem classes, sizes and kernels that were not, each with why.
        wrong: (op, kernel) that gave a wrong result, each with what was wrong; they are never chosen by times.
        unwritten: why results could not be kept on disk; empty if they were.
        unheeded: why selection does not read them; empty if it does.
        seconds: what the run took.
    """

    device: DeviceFacts
    entries: tuple[Entry, ...]
    left_out: tuple[LeftOut, ...] = ()
    wrong: Mapping[tuple[str, str], str] = field(default_factory=dict)
    unwritten: str = ""
    unheeded: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether something was measured and no kernel was wrong."""
        return bool(self.entries) and not self.wrong

    @property
    def regret(self) -> tuple[RegretRow, ...]:
        """One row for each size of each problem class, the order's largest regret first."""
        rows = [_row(entry, size) for entry in self.entries for size in entry.sizes if size.times]
        return tuple(sorted(rows, key=lambda row: -(row.order_regret.percent if row.order_regret else 0.0)))

    def export(self, path: str | Path) -> None:
        """Write what was measured as a table file, which `KERNELHUB_TUNED` names on machines of this kind.

        Raises:
            ConfigurationError: it cannot be written.
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
        told = f"{len(self.entries)} problem classes, {len(rows)} sizes measured on {self.device}"
        if rows:
            told += f"; another kernel than the order's is faster for {changed}"
            told += f"; regret of the choices {_figures([row.chosen_regret for row in rows])}"
            told += f", of the order {_figures([row.order_regret for row in rows])}"
        return told + (f"; {len(self.left_out)} left out" if self.left_out else "")

    def __str__(self) -> str:
        lines = []
        for entry in self.entries:
            lines.append(f"{entry.op} ({entry.regime}): {entry.chosen}: {WORDS[entry.word]}")
            lines.append(f"    {entry.key}")
            for size in entry.sizes:
                times = sorted(size.times.items(), key=lambda item: item[1].us)
                told = ", ".join(f"{name} {item.us:.4g} us +- {item.noise_us:.2g}" for name, item in times)
                lines.append(f"    {size.label}: {told}")
        lines += [f"wrong: {op} {kernel}: {why}" for (op, kernel), why in self.wrong.items()]
        lines += [f"left out: {item.what}: {item.why}" for item in self.left_out]
        return "\n".join([*lines, self.summary(), *filter(None, (self.unwritten, self.unheeded))])


def _row(entry: Entry, size: Size) -> RegretRow:
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
        return "is not known"
    return f"{sum(known) / len(known):.1f} % on average and {max(known):.1f} % at most"
