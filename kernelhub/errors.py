"""The one family of exceptions that kernelhub raises.

Each message says what was asked, what is wrong with it, what would be right and where to see more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelhub.dispatch.select import Selection


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


class NoKernel(KernelhubError, RuntimeError):
    """No registered kernel may answer the call, or none of those that were asked for.

    Attributes:
        selection: the verdict on every kernel of the op, with reasons and remedies.
    """

    def __init__(self, message: str, selection: Selection[Any]) -> None:
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
