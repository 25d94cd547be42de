"""The gate: whether the process is sealed, and which devices are lost.

A call that finds its function in a table does not read the gate. Calls that miss the table do, and so does work such
as compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from kernelhub.errors import ConfigurationError, DeviceLost, KernelhubError


@dataclass(frozen=True)
class Caller:
    """The call that causes some work.

    Attributes:
        op: name of the op.
        kernel: name of the kernel; empty while it is being selected.
        problem: the problem of the call.
        key: the call's key; None if it is unknown.
        frame: the innermost frame that identifies the call.
        bound: the bound selection that runs; None if there is none yet.
    """

    op: str
    kernel: str
    problem: Any
    key: Any
    frame: FrameType
    bound: Any = None


Refuse = Callable[[str, str, Caller], KernelhubError]


class Gate:
    """State of the gate. `GATE` is the only instance.

    Attributes:
        refuse: makes the error of work that is not allowed, from kind, object and caller; None while unsealed.
        changed: callbacks; each is called with the new value of `sealed` when it changes.
        lost: the first error of each lost device, by device index.
    """

    def __init__(self) -> None:
        self.refuse: Refuse | None = None
        self.changed: list[Callable[[bool], None]] = []
        self.lost: dict[int, DeviceLost] = {}

    @property
    def sealed(self) -> bool:
        return self.refuse is not None

    def close(self, refuse: Refuse) -> None:
        """Seal the process: work on behalf of a call raises the error that `refuse` makes."""
        self.refuse = refuse
        for notify in self.changed:
            notify(True)

    def open(self) -> None:
        """Unseal the process."""
        self.refuse = None
        for notify in self.changed:
            notify(False)

    def check_change(self, word: str) -> None:
        """Raise ConfigurationError if the process is sealed; `word` is the API function that discards selections."""
        if self.sealed:
            raise ConfigurationError(
                f"{word}() would discard every selection, and kernelhub is sealed; call unseal() first, then warm up "
                "and seal() again"
            )

    def check_device(self, device: int) -> None:
        """Raise DeviceLost if the device is lost."""
        if device in self.lost:
            raise self.lost[device].again()


GATE = Gate()
