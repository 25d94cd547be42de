"""The one family of exceptions that kernelhub raises.

Each message says what was asked, what is wrong with it, what would be right and where to see more.
"""

from __future__ import annotations

from typing import Any, Protocol


class KernelhubError(Exception):
    """Base of every exception raised by kernelhub itself."""


class InvalidArgument(KernelhubError, ValueError):
    """An argument of an op breaks the op's contract; raised before any launch.

    Attributes:
        parameter: name of the offending parameter, as in the op's signature.
    """

    def __init__(self, op: str, parameter: str, problem: str, fix: str) -> None:
        self.op = op
        self.parameter = parameter
        super().__init__(f"{op}: {parameter} {problem}; {fix}")


class Explained(Protocol):
    """What an error gives of a `kernelhub.Selection`."""

    @property
    def op(self) -> str:
        """Name of the op."""

    @property
    def problem(self) -> Any:
        """The problem: every facet of the call."""

    @property
    def selected(self) -> str | None:
        """Name of the selected kernel; None if there is none."""

    @property
    def decisions(self) -> tuple[Any, ...]:
        """One `Decision` for each kernel of the op: its name, and why it was rejected, with a remedy."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values for JSON."""


class NoKernel(KernelhubError, RuntimeError):
    """No registered kernel may answer the call, or none of those that were asked for.

    Attributes:
        selection: the selection on every kernel of the op, with reasons and remedies.
    """

    def __init__(self, message: str, selection: Explained) -> None:
        self.selection = selection
        super().__init__(f"{message}\n{selection}")


class RanksDisagree(KernelhubError, RuntimeError):
    """The ranks of a process group do not run one plan, so that none of them may.

    Attributes:
        code: stable word for what is wrong, e.g. ``"rank_dead"``; docs/ranks.md lists them.
        ranks: the ranks it is about, by their number in the group.
    """

    def __init__(self, code: str, message: str, ranks: tuple[int, ...]) -> None:
        self.code = code
        self.ranks = ranks
        super().__init__(message)


class KernelUnavailable(KernelhubError, RuntimeError):
    """A kernel was chosen, but importing or preparing it failed and nothing else may replace it."""


class ConfigurationError(KernelhubError, ValueError):
    """A variable, config file, context or argument names something that does not exist."""


class RegistrationError(KernelhubError, ValueError):
    """A kernel record, backend or op contradicts the schema it is registered under."""


class CacheError(KernelhubError, OSError):
    """A file has to be kept, and there is no place for it: every place and what is wrong with it."""


class LockTimeout(KernelhubError, TimeoutError):
    """A lock was not given up in time.

    Attributes:
        path: the lock's file.
        holder: who holds it, as words: process, machine, command.
        waited_s: seconds waited.
    """

    def __init__(self, path: object, holder: str, waited_s: float) -> None:
        self.path, self.holder, self.waited_s = path, holder, waited_s
        super().__init__(
            f"waited {waited_s:.0f} s for {path}, held by {holder}; look at that process, and end it if it hangs"
        )


class NotWarmed(KernelhubError, RuntimeError):
    """After `kernelhub.seal()`, a call that would compile, load, download, tune, pack, decide or sync; nothing ran.

    Attributes:
        op: the op that was called.
        kind: what it would have done: ``"decide"``, ``"compile"``, ``"load"``, ``"download"``, ``"tune"``, ``"pack"``
            or ``"sync"``.
        what: of what, e.g. the name of a kernel that is not compiled.
        line: Python that makes the call ready when it runs before `seal`; empty where no warm-up helps.
    """

    def __init__(self, op: str, kind: str, what: str, line: str, advice: str) -> None:
        self.op = op
        self.kind = kind
        self.what = what
        self.line = line
        super().__init__(
            f"{op}: kernelhub is sealed, and this call would {_WOULD.get(kind, kind)} {what}; "
            f"nothing was launched. {advice}"
        )


_WOULD = {"sync": "wait for the device to read"}


class DeviceLost(KernelhubError, RuntimeError):
    """A device error ended the use of a device in this process: every later call on it raises this at once.

    Attributes:
        device: index of the GPU, -1 for the CPU.
        op: the op out of whose launch the error came.
        kernel: the kernel that was launched.
        first: text of the first error, with its type.
        since: seconds since the epoch at which it was raised.
        plans: the plans made ready last on the device, newest first, as "op kernel, calls".
    """

    def __init__(self, device: int, op: str, kernel: str, first: str, since: float, plans: tuple[str, ...]) -> None:
        self.device = device
        self.op = op
        self.kernel = kernel
        self.first = first
        self.since = since
        self.plans = plans
        where = "the CPU" if device < 0 else f"cuda:{device}"
        told = "; ".join(plans)
        super().__init__(
            f"{where} is lost to this process: {op} by {kernel} raised {first}. CUDA tells of errors late, so an "
            f"earlier launch may be at fault; the last plans there: {told}. No call is tried again and no other kernel "
            "can help: end this process and start another. There KERNELHUB_CHECK=1 names a length, page or slot that "
            "lies outside before a kernel follows it, and CUDA_LAUNCH_BLOCKING=1 shows which launch it is"
        )

    def again(self) -> DeviceLost:
        """The same, to be raised once more."""
        return DeviceLost(self.device, self.op, self.kernel, self.first, self.since, self.plans)
