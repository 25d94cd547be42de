"""What this process may still do: all, or once sealed only what was made ready before; and which devices are lost.

Nothing here is read by a call that finds its function in a table: only by those that miss it, and by work such as
compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from kernelhub.errors import ConfigurationError, DeviceLost, KernelhubError


@dataclass(frozen=True)
class Caller:
    """On whose behalf work is done.

    Attributes:
        op: name of the op.
        kernel: the kernel; empty while it is being decided.
        problem: what is asked.
        key: the call's key, or None if not known.
        frame: the innermost frame that told so.
        bound: the selection that runs, or None.
    """

    op: str
    kernel: str
    problem: Any
    key: Any
    frame: FrameType
    bound: Any = None


Refuse = Callable[[str, str, Caller], KernelhubError]


class Gate:
    """The state.

    Attributes:
        refuse: makes the error for work that is not allowed, from kind, what and caller; None until sealed.
        changed: told whether the process is sealed, each time that this changes.
        lost: devices that are lost, by index.
    """

    def __init__(self) -> None:
        self.refuse: Refuse | None = None
        self.changed: list[Callable[[bool], None]] = []
        self.lost: dict[int, DeviceLost] = {}

    @property
    def sealed(self) -> bool:
        return self.refuse is not None

    def close(self, refuse: Refuse) -> None:
        """Seal: from now on work raises what `refuse` makes."""
        self.refuse = refuse
        for tell in self.changed:
            tell(True)

    def open(self) -> None:
        """Allow all work again."""
        self.refuse = None
        for tell in self.changed:
            tell(False)

    def check_change(self, word: str) -> None:
        """Raise if what a word of the API changes may not change any more."""
        if self.sealed:
            raise ConfigurationError(
                f"{word}() would have every choice made again, and kernelhub is sealed; unseal() first, then warm "
                "up and seal() again"
            )

    def check_device(self, device: int) -> None:
        """Raise if the device is lost."""
        if device in self.lost:
            raise self.lost[device].again()


GATE = Gate()
