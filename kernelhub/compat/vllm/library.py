"""Functions of a library that are imported at their first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.load import LoadFailure, load_attribute
from kernelhub.errors import KernelUnavailable
from kernelhub.probes.finding import Finding


def load(target: str, is_here: Callable[[], Finding]) -> Any:
    """The object that ``"module:attribute"`` names.

    Raises:
        KernelUnavailable: the library is not installed, does not import, or lacks the attribute; the message says
            which, and what to do. It is a RuntimeError.
    """
    finding = is_here()
    if not finding.ok:
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        raise KernelUnavailable(f"{target} is not available: {finding.reason}{remedy}")
    try:
        return load_attribute(target, HUB.settings["KERNELHUB_LOAD_TIMEOUT_S"])
    except LoadFailure as failure:
        raise KernelUnavailable(f"{target} is not available: {failure.reason}; {failure.remedy}") from failure


class Lazy:
    """A library's function, imported at its first call. A failure is not cached: the next call tries again.

    Args:
        target: ``"module:attribute"``.
        is_here: whether the library is installed, checked before the import.
        fallback: function that runs if this one is not available; by default the call raises.
    """

    def __init__(self, target: str, is_here: Callable[[], Finding], fallback: Callable[..., Any] | None = None) -> None:
        self.target = target
        self.__name__ = target.partition(":")[2]
        self.__doc__ = f"The function ``{target.replace(':', '.')}``."
        self._is_here = is_here
        self._fallback = fallback
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self._function
        return (self.function() if function is None else function)(*args, **kwargs)

    def function(self) -> Callable[..., Any]:
        """The library's own function.

        Raises:
            KernelUnavailable: it is not available, and it has no fallback.
        """
        try:
            function: Callable[..., Any] = load(self.target, self._is_here)
        except KernelUnavailable:
            if self._fallback is None:
                raise
            return self._fallback
        self._function = function
        return function
