"""Results of a warm-up: per item, and in total."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

COMPILED, LOADED, DECIDED, BEFORE, FAILED = "compiled", "from cache", "nothing to compile", "ready before", "failed"
HOWS = (COMPILED, LOADED, DECIDED, BEFORE, FAILED)


@dataclass(frozen=True)
class Outcome:
    """The result of one item: calls with one problem class and the same sizes.

    Attributes:
        op: name of the op, or of the callable.
        kernel: the kernel that ran; empty if none did.
        label: the layers that need it, and sizes that are not facets.
        tokens: token counts of the calls.
        how: one of `HOWS`.
        seconds: its time, in all processes that worked on it.
        reason: why it failed, or a remark; empty without one.
    """

    op: str
    kernel: str
    label: str
    tokens: tuple[int, ...]
    how: str
    seconds: float
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "kernel": self.kernel,
            "label": self.label,
            "tokens": list(self.tokens),
            "how": self.how,
            "seconds": round(self.seconds, 3),
            "reason": self.reason,
        }

    def __str__(self) -> str:
        line = f"{self.how:<18} {self.seconds:8.2f} s  {self.op} {self.kernel or '-'}: {self.label}"
        return f"{line}: {self.reason}" if self.reason else line


@dataclass(frozen=True)
class Earning:
    """The verification of one kernel for one problem class for which it would rank first.

    Attributes:
        op, kernel: the op and the kernel.
        label: the class, by the layers that need it.
        ok: whether it was right; selection then accepts it.
        seconds: its time.
        reason: why it is not selected; empty if it is.
    """

    op: str
    kernel: str
    label: str
    ok: bool
    seconds: float
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "seconds": round(self.seconds, 3)}

    def __str__(self) -> str:
        what = "verified, and selected now" if self.ok else f"not selected: {self.reason}"
        return f"{self.op} {self.kernel}: {what} ({self.seconds:.1f} s; {self.label})"


@dataclass(frozen=True)
class Peak:
    """Peak memory.

    Attributes:
        host_bytes: peak of this process.
        device_bytes: peak of torch on the device; 0 on a CPU.
        children_bytes: peak of the largest child process, including compilers.
    """

    host_bytes: int = 0
    device_bytes: int = 0
    children_bytes: int = 0


@dataclass(frozen=True)
class WarmUp:
    """The result of `kernelhub.warmup`; `str` for people, `to_dict` for machines.

    Attributes:
        device: the device.
        items: one result for each problem class and kind of call.
        taken_over: number of items that an earlier warm-up, or another process of this node, left ready on disk.
        jobs: processes that compiled.
        waited_s: seconds of waiting for another process that compiles on this node.
        waited_for: that process, as text; empty without one.
        verified: kernels that were checked against their references, as (op, kernel).
        quarantined: those of them that are wrong, each with its reason; the next best kernel is used.
        unverified: kernels that run and could not be verified, each with the reason.
        seconds: total time.
        peak: peak memory.
        notes: further messages.
        earned: kernels that would rank first and were verified for a problem class, right or not.
        stages: time of each stage, as (stage, seconds): see `Beat.stage`.
    """

    device: str
    items: tuple[Outcome, ...]
    taken_over: int = 0
    jobs: int = 1
    waited_s: float = 0.0
    waited_for: str = ""
    verified: tuple[tuple[str, str], ...] = ()
    quarantined: tuple[tuple[str, str, str], ...] = ()
    unverified: tuple[tuple[str, str, str], ...] = ()
    seconds: float = 0.0
    peak: Peak = field(default_factory=Peak)
    notes: tuple[str, ...] = ()
    earned: tuple[Earning, ...] = ()
    stages: tuple[tuple[str, float], ...] = ()

    @property
    def failures(self) -> tuple[Outcome, ...]:
        return tuple(item for item in self.items if item.how == FAILED)

    @property
    def ok(self) -> bool:
        """Whether every item is ready: such calls run after `kernelhub.seal()`."""
        return not self.failures

    @property
    def counts(self) -> dict[str, int]:
        """The number of items by how they were prepared."""
        found = [item.how for item in self.items]
        return {how: found.count(how) for how in HOWS}

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "device": self.device,
            "counts": self.counts,
            "taken_over": self.taken_over,
            "jobs": self.jobs,
            "waited_s": round(self.waited_s, 3),
            "waited_for": self.waited_for,
            "verified": [list(pair) for pair in self.verified],
            "quarantined": [list(item) for item in self.quarantined],
            "unverified": [list(item) for item in self.unverified],
            "seconds": round(self.seconds, 3),
            "peak": vars(self.peak),
            "notes": list(self.notes),
            "earned": [earning.to_dict() for earning in self.earned],
            "stages": {stage: round(seconds, 3) for stage, seconds in self.stages},
            "items": [item.to_dict() for item in self.items],
        }

    def summary(self) -> str:
        """The totals in a few sentences."""
        counted = ", ".join(f"{number} {how}" for how, number in self.counts.items() if number) or "no items"
        parts = [f"{len(self.items)} items on {self.device} in {self.seconds:.1f} s: {counted}"]
        if self.taken_over:
            parts.append(f"{self.taken_over} of them were ready on disk before")
        if self.waited_for:
            parts.append(f"waited {self.waited_s:.1f} s for {self.waited_for}")
        if self.verified:
            parts.append(f"{len(self.verified)} kernels verified, {len(self.quarantined)} of them quarantined")
        if self.earned:
            right = [earning for earning in self.earned if earning.ok]
            seconds = sum(earning.seconds for earning in self.earned)
            parts.append(f"{len(right)} of {len(self.earned)} kernels that would be first are right ({seconds:.1f} s)")
        if self.stages:
            parts.append(", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self.stages))
        megabytes = [size >> 20 for size in (self.peak.host_bytes, self.peak.device_bytes, self.peak.children_bytes)]
        parts.append("peak memory {} MB of the process, {} MB of the device, {} MB of a child".format(*megabytes))
        return "; ".join(parts)

    def __str__(self) -> str:
        lines = [str(item) for item in self.items]
        lines += [f"quarantined: {op} {kernel}: {reason}" for op, kernel, reason in self.quarantined]
        lines += [f"not verified: {op} {kernel}: {reason}" for op, kernel, reason in self.unverified]
        lines += [str(earning) for earning in self.earned]
        return "\n".join([*lines, *self.notes, self.summary()])
