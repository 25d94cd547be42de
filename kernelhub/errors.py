"""All exceptions that kernelhub raises.

Each message states the request, what is wrong with it, how to fix it, and where to see more.
"""

from __future__ import annotations

from typing import Any, Protocol


class KernelhubError(Exception):
    """Base of every exception raised by kernelhub itself.

    All can be copied and pickled, as pools of processes do with the exceptions of their workers.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Without a call of `__init__`, whose parameters are not `args`."""
        reduced = super().__reduce__()
        assert isinstance(reduced, tuple)
        return _again, reduced[:2], *reduced[2:]


def _again(kind: type[KernelhubError], arguments: tuple[Any, ...]) -> KernelhubError:
    error = kind.__new__(kind, *arguments)
    if not error.args:  # those of an OSError are set by its `__init__`
        error.args = arguments
    return error


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
    """No registered kernel can run the call, or none of the requested ones.

    Attributes:
        selection: the selection, with reasons and remedies for every kernel of the op.
    """

    def __init__(self, message: str, selection: Explained) -> None:
        self.selection = selection
        super().__init__(f"{message}\n{selection}")


class RanksDisagree(KernelhubError, RuntimeError):
    """The ranks of a process group do not agree on one plan; none of them may run.

    Attributes:
        code: stable code of the cause, e.g. ``"rank_dead"``; docs/ranks.md lists them.
        ranks: the ranks concerned, by their number in the group.
    """

    def __init__(self, code: str, message: str, ranks: tuple[int, ...]) -> None:
        self.code = code
        self.ranks = ranks
        super().__init__(message)


class KernelUnavailable(KernelhubError, RuntimeError):
    """A kernel was selected, but importing or preparing it failed and no other kernel may replace it."""


class ConfigurationError(KernelhubError, ValueError):
    """A variable, config file, context or argument names something that does not exist."""


class RegistrationError(KernelhubError, ValueError):
    """A kernel record, backend or op contradicts the schema it is registered under."""


class CacheError(KernelhubError, OSError):
    """A file must be stored, but no folder is writable; the message lists every folder and its fault."""


class LockTimeout(KernelhubError, TimeoutError):
    """A lock was not released in time.

    Attributes:
        path: the lock's file.
        holder: process, machine and command of its owner, as text.
        waited_s: seconds waited.
    """

    def __init__(self, path: object, holder: str, waited_s: float) -> None:
        self.path, self.holder, self.waited_s = path, holder, waited_s
        super().__init__(
            f"waited {waited_s:.0f} s for {path}, held by {holder}; look at that process, and end it if it hangs"
        )


class NotWarmed(KernelhubError, RuntimeError):
    """After `kernelhub.seal()`, a call would compile, load, download, tune, pack, decide or sync; nothing ran.

    Attributes:
        op: the op that was called.
        kind: what it would have done: ``"decide"``, ``"compile"``, ``"load"``, ``"download"``, ``"tune"``, ``"pack"``
            or ``"sync"``.
        what: the object of that action, e.g. the name of a kernel that is not compiled.
        line: Python that makes the call ready if it runs before `seal`; empty if no warm-up helps.
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
    """A device error made a device unusable in this process; every later call on it raises this error immediately.

    Attributes:
        device: index of the GPU, -1 for the CPU.
        op: the op whose launch raised the error.
        kernel: the kernel that was launched.
        first: text of the first error, with its type.
        since: time of the error, in seconds since the epoch.
        plans: the most recent plans on the device, newest first, as "op kernel, calls".
    """

    def __init__(self, device: int, op: str, kernel: str, first: str, since: float, plans: tuple[str, ...]) -> None:
        self.device = device
        self.op = op
        self.kernel = kernel
        self.first = first
        self.since = since
        self.plans = plans
        where = "the CPU" if device < 0 else f"cuda:{device}"
        recent = "; ".join(plans)
        super().__init__(
            f"{where} is lost to this process: {op} by {kernel} raised {first}. CUDA reports errors late, so an "
            f"earlier launch may be at fault; the last plans on the device: {recent}. No call is retried, here or on "
            "another kernel: end this process and start another. There, KERNELHUB_CHECK=1 names a length, page "
            "or slot that is out of range before a kernel reads it, and CUDA_LAUNCH_BLOCKING=1 shows the failing launch"
        )

    def again(self) -> DeviceLost:
        """A copy of this error, to raise again."""
        return DeviceLost(self.device, self.op, self.kernel, self.first, self.since, self.plans)
