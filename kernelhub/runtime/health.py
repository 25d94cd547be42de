"""Whether this process can still serve, for a probe endpoint."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass

from kernelhub.dispatch.audits import AUDITS, SKIPPED
from kernelhub.dispatch.gate import GATE


@dataclass(frozen=True)
class Health:
    """What `kernelhub.health` tells.

    Attributes:
        ok: no device was lost.
        reason: the first error with what to do; empty if all is well.
        device: index of the device that was lost first, -1 for the CPU; None if all is well.
        since: seconds since the epoch at which it was lost; None if all is well.
        op: the op out of whose launch the error came; empty if all is well.
        kernel: the kernel that was launched; empty if all is well.
        last_plans: the plans made ready last on that device, newest first, each with its calls.
        lost_devices: indices of all devices that were lost.
        sealed: whether `kernelhub.seal` holds.
        audited: calls that were recomputed and compared (KERNELHUB_AUDIT).
        wrong_in_service: for each kernel whose numbers were wrong in these, its op, its name and how often. Its calls
            go on unless KERNELHUB_AUDIT_ACTION says otherwise, so `ok` does not speak of it.
        not_compared: calls that were taken to be recomputed and were not, by reason, the most first, and how many.
            Launches that a CUDA graph replays are none of these: no audit sees them.
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
        """The same as a JSON object."""
        return json.dumps(asdict(self))


def health() -> Health:
    """Can this process still serve? Touches no device, takes no lock, and never raises.

    A device error out of a launch (illegal access, failed launch, uncorrectable memory error) is final for its process:
    later calls on the device raise `kernelhub.errors.DeviceLost`, and this says so. Running out of memory is not.

    Example:
        >>> import kernelhub
        >>> kernelhub.health().ok
        True
    """
    audits = AUDITS.told()
    wrong = tuple(f"{one.op} {one.kernel}: {one.wrong} of {one.checked} calls" for one in audits if one.wrong)
    audited = sum(one.checked for one in audits)
    skipped = sum((Counter(one.skipped) for one in audits), Counter())
    left = tuple(f"{count} calls: {SKIPPED[word]}" for word, count in skipped.most_common())
    lost = list(GATE.lost.values())
    if not lost:
        return Health(True, "", None, None, "", "", (), (), GATE.sealed, audited, wrong, left)
    first = min(lost, key=lambda error: error.since)
    devices = tuple(sorted(error.device for error in lost))
    told = (str(first), first.device, first.since, first.op, first.kernel, first.plans, devices, GATE.sealed)
    return Health(False, *told, audited, wrong, left)
