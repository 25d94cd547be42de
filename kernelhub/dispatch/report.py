"""The report: kernels that ran with calls and reasons, fallbacks, and work such as compiling.

This module has the data types and their text. `dispatch.ledger` counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.audits import Audited
from kernelhub.dispatch.work import Work


@dataclass(frozen=True)
class Row:
    """Calls of one kernel for one problem.

    Attributes:
        op: name of the op.
        kernel: name of the kernel.
        calls: number of calls; 0 if the kernel was only prepared.
        source: source of the selection, as in `Selection.source`.
        because: reason of the selection, as in `Selection.because`.
        problem: facets of the problem.
    """

    op: str
    kernel: str
    calls: int
    source: str
    because: str
    problem: dict[str, Any]


@dataclass(frozen=True)
class Fallback:
    """A selected kernel that could not be loaded, so that the next kernel ran.

    Attributes:
        op: name of the op.
        kernel: name of the kernel that could not be loaded.
        code: stable code of the failure.
        reason: the failure, as a sentence.
        count: number of fallbacks from this kernel with this code.
    """

    op: str
    kernel: str
    code: str
    reason: str
    count: int


@dataclass(frozen=True)
class Report:
    """What this process has run; `kernelhub.report()` returns it. `str` gives a table, `to_dict` plain values.

    Attributes:
        rows: calls by kernel, problem and reason; replays of CUDA graphs are not counted.
        fallbacks: kernels that could not be loaded and were replaced by the next.
        work: what was compiled, loaded, downloaded, tuned or packed.
        sealed: whether the process is sealed (`kernelhub.seal()`).
        on_gpu: whether a row is for a GPU, so that graphs may have replayed launches that are not counted.
        audits: counts of recomputed and compared calls, by op and kernel (KERNELHUB_AUDIT).
    """

    rows: tuple[Row, ...]
    fallbacks: tuple[Fallback, ...]
    work: tuple[Work, ...] = ()
    sealed: bool = False
    on_gpu: bool = False
    audits: tuple[Audited, ...] = ()

    @property
    def after_seal(self) -> tuple[Work, ...]:
        """Work done after `kernelhub.seal()`. kernelhub refuses its own, so that this is work of other code."""
        return tuple(item for item in self.work if item.sealed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the attributes' names as keys."""
        return {
            "rows": [vars(row) for row in self.rows],
            "fallbacks": [vars(fallback) for fallback in self.fallbacks],
            "work": [vars(item) for item in self.work],
            "sealed": self.sealed,
            "on_gpu": self.on_gpu,
            "audits": [vars(item) for item in self.audits],
        }

    def __str__(self) -> str:
        if not self.rows and not self.work:
            return "nothing has run yet"
        lines = [f"{'op':<18} {'kernel':<18} {'calls':>8}  why"]
        for row in self.rows:
            apart = self._apart(row)
            why = f"{apart}: {row.because}" if apart else row.because
            lines.append(f"{row.op:<18} {row.kernel:<18} {row.calls:>8}  {why}")
        if self.on_gpu:
            lines.append("a call captured in a CUDA graph counts once; replays are not counted")
        lines += [
            f"fallback from {item.kernel} for {item.op}, {item.count} times: {item.reason}" for item in self.fallbacks
        ]
        lines += self._work_lines()
        lines += map(str, self.audits)
        if self.audits and self.on_gpu:
            lines.append("launches that a CUDA graph replays are not audited")
        return "\n".join(lines)

    def _work_lines(self) -> list[str]:
        """Count and seconds of work by kind, library and op."""
        if not self.work and not self.sealed:
            return []
        counts: dict[tuple[str, str, str], list[float]] = {}
        for item in self.work:
            counts.setdefault((item.kind, item.by, item.op or "others"), []).append(item.seconds)
        lines = [
            f"{kind} by {by} for {op}: {len(seconds)}, {sum(seconds):.2f} s"
            for (kind, by, op), seconds in counts.items()
        ]
        return [*lines, f"sealed, with {len(self.after_seal)} of these after it"] if self.sealed else lines

    def _apart(self, row: Row) -> str:
        """The facets in which a row's problem differs from those of the op's other rows."""
        others = [other.problem for other in self.rows if other.op == row.op]
        return ", ".join(
            f"{name}={value}" for name, value in row.problem.items() if any(other[name] != value for other in others)
        )
