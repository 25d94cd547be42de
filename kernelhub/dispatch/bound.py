"""A selection made ready, and how the chosen adapter is made."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.configuration import Configuration
from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.events import fallback_log
from kernelhub.dispatch.kernel import Kernel, Watch
from kernelhub.dispatch.load import LoadFailure, failure_of, is_imported, load_attribute
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.work import JOURNAL

watch_log = logging.getLogger("kernelhub.watch")


@dataclass(eq=False)
class Bound:
    """A selection made ready: the adapter's instance and the function that a call runs; nothing of it changes.

    Attributes:
        selection: the selection it came from.
        adapter: instance of the op's adapter class, made for the problem.
        run: the call, with the op's arguments in the order that the op's module says.
        device: index of the GPU that it was made for, -1 for the CPU.
        calls: how often `run` was entered.
    """

    selection: Selection[Any]
    adapter: Any
    run: Callable[..., Any]
    counter: Any
    device: int

    @property
    def calls(self) -> int:
        return calls_of(self.counter)


def calls_of(counter: Any) -> int:
    """The number that an `itertools.count` has come to."""
    return int(repr(counter)[len("count(") : -1])  # the only way to read one that Python will keep


def make_adapter(
    kernel: Kernel, contract: Contract[Any], problem: Any, timeout_s: float, watch: Callable[[], None]
) -> Any:
    """An instance of a kernel's adapter; `watch` is called whenever a library may have been imported.

    Raises:
        LoadFailure: its module cannot be imported, or it cannot be made for the problem here.
    """
    make = load_attribute(kernel.target, timeout_s)
    watch()
    try:
        adapter = make(problem)
    except (Exception, SystemExit) as error:  # some libraries are imported here, and leave where there is no GPU
        raise failure_of("preparing it", error, "disable it and report this") from error
    if not isinstance(adapter, contract.adapter):
        raise LoadFailure(
            "load_failed",
            f"{kernel.target} gives {type(adapter).__name__}, not a {contract.adapter.__name__}",
            "fix the backend",
        )
    watch()
    return adapter


def configure(adapter: Any, kernel: Kernel, measured: Mapping[int, Configuration]) -> None:
    """Have an adapter take the sizes that were measured for its problem, if some were."""
    if not measured:
        return
    try:
        adapter.configure(measured)
    except (KeyError, TypeError, ValueError) as error:
        adapter.configure({})
        told = "%s: %s does not understand its measured sizes and takes its own: %r; `kernelhub tune` measures anew"
        fallback_log.warning(told, kernel.op, kernel.name, error)


def watch_imported(watches: Iterable[Watch], watched: set[Watch], timeout_s: float) -> None:
    """Have the libraries that are imported by now, and were not in `watched`, tell of what they compile."""
    for watch in watches:
        if watch.module in sys.modules and watch not in watched and is_imported(watch.module):
            try:
                load_attribute(watch.target, timeout_s)(watch.module, JOURNAL)
            except Exception as error:  # a library may have changed; calls of it are as good as before
                watch_log.warning("what %s compiles is neither counted nor refused: %r", watch.module, error)
            watched.add(watch)
