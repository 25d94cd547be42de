"""What a user does with the state of a process: report what ran, read everything again, register a backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.registry import Registered
from kernelhub.dispatch.report import Report


def report() -> Report:
    """What ran in this process, how often, and why; print it, or take `to_dict()`.

    Calls of ops, plans and steps are counted on the host. A call that is made while a CUDA graph is captured counts
    once, and a replay of that graph not at all: the host makes no call then. Where a graph serves most steps, the
    numbers tell which kernels are in it, and a profiler how often they ran.
    """
    return HUB.report()


def reload() -> None:
    """Read the KERNELHUB_* variables, the config file and the plugins again, and ask every probe again."""
    HUB.reload()


@dataclass(frozen=True)
class BackendHandle:
    """A backend registered at run time.

    Attributes:
        registered: what was registered.
    """

    registered: Registered

    def remove(self) -> None:
        """Take the backend out again."""
        HUB.remove_backend(self.registered.name)


def register_backend(module: Any) -> BackendHandle:
    """Register a backend in this process, as an entry point of `kernelhub.backends` would.

    Args:
        module: anything with `BACKEND`, `KERNELS` and optionally `KNOWN_BAD`.

    Returns:
        A handle whose `remove()` takes it out again.

    Raises:
        RegistrationError: a record contradicts the schema of its op, or a name is taken.
    """
    return BackendHandle(HUB.add_backend(module))
