"""What ran, how often, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.audits import Audited
from kernelhub.dispatch.work import Work


@dataclass(frozen=True)
class Row:
    """One choice that was made ready, with the calls that used it."""

    op: str
    kernel: str
    calls: int
    source: str
    because: str
    problem: dict[str, Any]


@dataclass(frozen=True)
class Fallback:
    """A kernel that was chosen automatically but could not be loaded, so that the next one ran."""

    op: str
    kernel: str
    code: str
    reason: str
    count: int


@dataclass(frozen=True)
class Report:
    """Everything this process has dispatched; `str` for people, `to_dict` for machines.

    Attributes:
        rows: one for each choice, with its calls; launches that a CUDA graph replays are no calls.
        fallbacks: kernels that were passed over.
        work: what was compiled, loaded or tuned meanwhile.
        sealed: whether `kernelhub.seal()` was called.
        on_gpu: whether a row is of a GPU, so that graphs may have replayed more than was counted.
        audits: calls that were recomputed and compared, by op and kernel (KERNELHUB_AUDIT).
    """

    rows: tuple[Row, ...]
    fallbacks: tuple[Fallback, ...]
    work: tuple[Work, ...] = ()
    sealed: bool = False
    on_gpu: bool = False
    audits: tuple[Audited, ...] = ()

    @property
    def after_seal(self) -> tuple[Work, ...]:
        """The work done after `kernelhub.seal()`: none of kernelhub's, which is refused, but perhaps of others."""
        return tuple(item for item in self.work if item.sealed)

    def to_dict(self) -> dict[str, Any]:
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
            lines.append("a call made while a CUDA graph was captured counts once, its replays are not counted")
        lines += [
            f"fell past {item.kernel} for {item.op}, {item.count} times: {item.reason}" for item in self.fallbacks
        ]
        lines += self._told_work()
        lines += map(str, self.audits)
        if self.audits and self.on_gpu:
            lines.append("audits see no launch that a CUDA graph replays")
        return "\n".join(lines)

    def _told_work(self) -> list[str]:
        """What was compiled and so on, counted by op and library."""
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
        """The facets that tell a row's problem from those of the other rows of its op."""
        others = [other.problem for other in self.rows if other.op == row.op]
        return ", ".join(
            f"{name}={value}" for name, value in row.problem.items() if any(other[name] != value for other in others)
        )
