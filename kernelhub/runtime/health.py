"""Whether this process can still serve, for a probe endpoint."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass

from kernelhub.dispatch.audits import AUDITS, SKIPPED
from kernelhub.dispatch.gate import GATE


@dataclass(frozen=True)
class Health:
    """The result of `kernelhub.health`.

    Attributes:
        ok: no device was lost.
        reason: the first error with a remedy; empty if `ok`.
        device: index of the device that was lost first, -1 for the CPU; None if `ok`.
        since: time of that loss, in seconds since the epoch; None if `ok`.
        op: the op whose launch raised the error; empty if `ok`.
        kernel: the kernel that was launched; empty if `ok`.
        last_plans: the most recent plans on that device, newest first, each with its calls.
        lost_devices: indices of all devices that were lost.
        sealed: whether the process is sealed.
        audited: number of calls that were recomputed and compared (KERNELHUB_AUDIT).
        wrong_in_service: op, name and number of wrong calls of each kernel that an audit found wrong. Its calls
            continue unless KERNELHUB_AUDIT_ACTION says otherwise, so `ok` does not include it.
        not_compared: number of sampled calls that could not be compared, by reason, the most frequent first. Launches
            that a CUDA graph replays are not included: an audit does not see them.
    """

    ok: bool
    reason: str
    device: int | None
    since: float | None
    op: str
    kernel: str
    last_plans: tuple[str, ...]
    lost_devices: tuple[int, ...]
    sealed: bool
    audited: int = 0
    wrong_in_service: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Plain values for JSON."""
        return json.dumps(asdict(self))


def health() -> Health:
    """Whether this process can still serve. Uses no device, takes no lock, and never raises.

    A device error of a launch (illegal access, failed launch, uncorrectable memory error) is final for its process:
    later calls on the device raise `kernelhub.errors.DeviceLost`, and `ok` is False. Running out of memory is not.

    Example:
        >>> import kernelhub
        >>> kernelhub.health().ok
        True
    """
    audits = AUDITS.counts()
    wrong = tuple(f"{one.op} {one.kernel}: {one.wrong} of {one.checked} calls" for one in audits if one.wrong)
    audited = sum(one.checked for one in audits)
    skipped = sum((Counter(one.skipped) for one in audits), Counter())
    left = tuple(f"{count} calls: {SKIPPED[word]}" for word, count in skipped.most_common())
    lost = list(GATE.lost.values())
    if not lost:
        return Health(True, "", None, None, "", "", (), (), GATE.sealed, audited, wrong, left)
    first = min(lost, key=lambda error: error.since)
    devices = tuple(sorted(error.device for error in lost))
    loss = (str(first), first.device, first.since, first.op, first.kernel, first.plans, devices, GATE.sealed)
    return Health(False, *loss, audited, wrong, left)
