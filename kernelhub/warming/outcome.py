"""What a warm-up did: per item, and in all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

COMPILED, LOADED, DECIDED, BEFORE, FAILED = "compiled", "from cache", "nothing to compile", "ready before", "failed"
HOWS = (COMPILED, LOADED, DECIDED, BEFORE, FAILED)


@dataclass(frozen=True)
class Outcome:
    """One item: calls that have a problem class and sizes in common.

    Attributes:
        op: name of the op; of a callable its name.
        kernel: the kernel that ran; empty if none did.
        label: which layers ask for it, and sizes that no facet holds.
        tokens: token counts that were called.
        how: one of `HOWS`.
        seconds: what it took, in all processes that worked on it.
        reason: why it failed, or what is to be known of it; empty if there is nothing.
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
        told = f"{self.how:<18} {self.seconds:8.2f} s  {self.op} {self.kernel or '-'}: {self.label}"
        return f"{told}: {self.reason}" if self.reason else told


@dataclass(frozen=True)
class Earning:
    """One kernel that was verified for one problem class, because it would be first.

    Attributes:
        op, kernel: which.
        label: the class, by the layers that ask for it.
        ok: it was right, and is chosen from now on.
        seconds: what that took.
        reason: why it is not chosen; empty if it is.
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
        what = "verified, and chosen now" if self.ok else f"not chosen: {self.reason}"
        return f"{self.op} {self.kernel}: {what} ({self.seconds:.1f} s; {self.label})"


@dataclass(frozen=True)
class Peak:
    """Most memory that was in use.

    Attributes:
        host_bytes: of this process.
        device_bytes: that torch held on the device; 0 on a CPU.
        children_bytes: of the largest child process, compilers included.
    """

    host_bytes: int = 0
    device_bytes: int = 0
    children_bytes: int = 0


@dataclass(frozen=True)
class WarmUp:
    """What `kernelhub.warmup` did; `str` for people, `to_dict` for machines.

    Attributes:
        device: the device.
        items: one for each problem class and kind of call.
        taken_over: items that an earlier warm-up, or another process of this node, had made ready on disk.
        jobs: processes that compiled.
        waited_s: how long another process that compiles on this node was waited for.
        waited_for: that process, as words; empty if none was.
        verified: kernels that were held against their references, as (op, kernel).
        quarantined: those of them that are wrong, each with its reason; the next best was taken.
        unverified: kernels that run and could not be verified, each with why.
        seconds: what all took.
        peak: most memory.
        notes: what else is to be known.
        earned: kernels that would be first and were verified for a problem class, right or not.
        stages: what each stage took, as (stage, seconds): see `Beat.stage`.
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
        """Whether everything is ready: calls like these pass after `kernelhub.seal()`."""
        return not self.failures

    @property
    def counts(self) -> dict[str, int]:
        """How many items were made ready in each way."""
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
            "quarantined": [list(told) for told in self.quarantined],
            "unverified": [list(told) for told in self.unverified],
            "seconds": round(self.seconds, 3),
            "peak": vars(self.peak),
            "notes": list(self.notes),
            "earned": [earning.to_dict() for earning in self.earned],
            "stages": {stage: round(seconds, 3) for stage, seconds in self.stages},
            "items": [item.to_dict() for item in self.items],
        }

    def summary(self) -> str:
        """The totals in a few sentences."""
        counted = ", ".join(f"{number} {how}" for how, number in self.counts.items() if number) or "nothing asked"
        told = [f"{len(self.items)} items on {self.device} in {self.seconds:.1f} s: {counted}"]
        if self.taken_over:
            told.append(f"{self.taken_over} of them were made ready on disk before, and taken over")
        if self.waited_for:
            told.append(f"waited {self.waited_s:.1f} s for {self.waited_for}")
        if self.verified:
            told.append(f"{len(self.verified)} kernels verified, {len(self.quarantined)} of them quarantined")
        if self.earned:
            right = [earning for earning in self.earned if earning.ok]
            seconds = sum(earning.seconds for earning in self.earned)
            told.append(f"{len(right)} of {len(self.earned)} kernels that would be first are right ({seconds:.1f} s)")
        if self.stages:
            told.append(", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self.stages))
        megabytes = [size >> 20 for size in (self.peak.host_bytes, self.peak.device_bytes, self.peak.children_bytes)]
        told.append("peak memory {} MB of the process, {} MB of the device, {} MB of a child".format(*megabytes))
        return "; ".join(told)

    def __str__(self) -> str:
        lines = [str(item) for item in self.items]
        lines += [f"quarantined: {op} {kernel}: {reason}" for op, kernel, reason in self.quarantined]
        lines += [f"not verified: {op} {kernel}: {reason}" for op, kernel, reason in self.unverified]
        lines += [str(earning) for earning in self.earned]
        return "\n".join([*lines, *self.notes, self.summary()])
