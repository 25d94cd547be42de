"""Bound selections: the adapter of a selected kernel, its instance, and the function that a call runs.

`dispatch.hub` decides when an adapter is made; this module makes it, gives it its tuned sizes, and hooks its library.
"""

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
    """A selection with the adapter's instance and the function that a call runs. Immutable except for the call count.

    Attributes:
        selection: the selection.
        adapter: instance of the op's adapter class, made for the problem.
        run: the call; takes the op's arguments in the order that the op's module documents.
        counter: `itertools.count` that `run` advances.
        device: index of the GPU that it was made for, -1 for the CPU.
        calls: number of calls of `run`.
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
    """The current value of an `itertools.count`."""
    return int(repr(counter)[len("count(") : -1])  # the only way to read it that Python does not deprecate


def make_adapter(
    kernel: Kernel, contract: Contract[Any], problem: Any, timeout_s: float, watch: Callable[[], None]
) -> Any:
    """An instance of a kernel's adapter. `watch` is called each time a library may have been imported.

    Raises:
        LoadFailure: the module of the adapter cannot be imported, or the adapter cannot be made for the problem.
    """
    make = load_attribute(kernel.target, timeout_s)
    watch()
    try:
        adapter = make(problem)
    except (Exception, SystemExit) as error:  # some libraries are imported here, and exit without a GPU
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
    """Give an adapter the sizes that were measured for its problem, if there are any."""
    if not measured:
        return
    try:
        adapter.configure(measured)
    except (KeyError, TypeError, ValueError) as error:
        adapter.configure({})
        message = "%s: %s rejected its tuned sizes and uses its defaults: %r; run `kernelhub tune` again"
        fallback_log.warning(message, kernel.op, kernel.name, error)


def watch_imported(watches: Iterable[Watch], watched: set[Watch], timeout_s: float) -> None:
    """Hook the libraries that are imported and not yet in `watched`, so that they log their compiles."""
    for watch in watches:
        if watch.module in sys.modules and watch not in watched and is_imported(watch.module):
            try:
                load_attribute(watch.target, timeout_s)(watch.module, JOURNAL)
            except Exception as error:  # a library may have changed; its calls still work
                message = "cannot hook %s: its compiles are neither counted nor refused: %r"
                watch_log.warning(message, watch.module, error)
            watched.add(watch)
