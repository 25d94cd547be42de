"""Reports what FlashInfer compiles, loads, downloads and tunes, by wrapping its functions for these (0.6 and 0.7).

A module of FlashInfer's is built and loaded once, by `JitSpec.build_and_load`; what it loads once loaded is kept in its
own caches and comes here no more. Binaries are downloaded by `download_file`, often out of a callback of compiled code,
which loses what it raises: the refusal is found again by the launch.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

from kernelhub.dispatch.work import Journal

_BY = "flashinfer"


class _Inside(threading.local):
    spec = False


_INSIDE = _Inside()


def watch(module: str, journal: Journal) -> None:
    """Hook builds and loads; `module` is the name of a module that defines kinds of `JitSpec`."""
    for kind in [one for one in vars(sys.modules[module]).values() if isinstance(one, type)]:
        for method in ("build_and_load", "build") if kind.__name__.startswith("JitSpec") else ():
            made = vars(kind).get(method)
            if made is not None and not hasattr(made, "_kernelhub"):
                setattr(kind, method, _building(made, journal))


def watch_downloads(module: str, journal: Journal) -> None:
    """Hook what downloads, wherever it was imported to; `module` is the name of the one that defines it."""
    original = getattr(sys.modules[module], "download_file", None)
    reported = None if original is None else _downloading(original, journal)
    for name, other in list(sys.modules.items()):
        if name.startswith(module.partition(".")[0]) and vars(other).get("download_file") is original is not None:
            other.download_file = reported  # type: ignore[attr-defined]


def watch_tuner(module: str, journal: Journal) -> None:
    """Hook FlashInfer's tuner; `module` is the name of the module that defines it."""
    tuner: Any = getattr(sys.modules[module], "AutoTuner", None)
    made = getattr(tuner, "_profile_single_kernel", None)
    if made is None or hasattr(made, "_kernelhub"):
        return

    @functools.wraps(made)
    def reported(self: Any, runner: Any, *arguments: Any, **named: Any) -> Any:
        with journal.doing("tune", type(runner).__name__, _BY):
            return made(self, runner, *arguments, **named)

    reported._kernelhub = True  # type: ignore[attr-defined]
    tuner._profile_single_kernel = reported


def watch_masked(module: str, journal: Journal) -> None:
    """Hook what compiles CuTe DSL's product of masked rows, which keeps a kernel for each set of sizes."""
    name = "get_cute_dsl_compiled_masked_gemm_kernel"
    made = getattr(sys.modules[module], name, None)
    if made is None or hasattr(made, "_kernelhub"):
        return
    known: set[Any] = set()

    @functools.wraps(made)
    def reported(*arguments: Any, **named: Any) -> Any:
        sizes = (*arguments, *named.items())
        if sizes in known:
            return made(*arguments, **named)
        with journal.doing("compile", "grouped_gemm_nt_masked", _BY):
            kernel = made(*arguments, **named)
        known.add(sizes)
        return kernel

    reported._kernelhub = True  # type: ignore[attr-defined]
    setattr(sys.modules[module], name, reported)


def watch_tiles(module: str, journal: Journal) -> None:
    """Hook what compiles cuTile's kernels, FlashInfer's or another's; `module` is the name of the one that defines it.

    What a process compiled before is kept by the kernels and comes here no more.
    """
    made = getattr(sys.modules[module], "compile_tile", None)
    if made is None or hasattr(made, "_kernelhub"):
        return

    @functools.wraps(made)
    def reported(kernel: Any, *arguments: Any, **named: Any) -> Any:
        name = getattr(getattr(kernel, "pyfunc", kernel), "__name__", type(kernel).__name__)
        with journal.doing("compile", name, "cutile"):
            return made(kernel, *arguments, **named)

    reported._kernelhub = True  # type: ignore[attr-defined]
    sys.modules[module].compile_tile = reported  # type: ignore[attr-defined]


def _building(made: Any, journal: Journal) -> Any:
    @functools.wraps(made)
    def reported(self: Any, *arguments: Any, **named: Any) -> Any:
        if _INSIDE.spec:
            return made(self, *arguments, **named)
        kind = "load" if getattr(self, "is_aot", False) or self.is_compiled else "compile"
        _INSIDE.spec = True
        try:
            with journal.doing(kind, self.name, _BY):
                return made(self, *arguments, **named)
        finally:
            _INSIDE.spec = False

    reported._kernelhub = True  # type: ignore[attr-defined]
    return reported


def _downloading(made: Any, journal: Journal) -> Any:
    @functools.wraps(made)
    def reported(source: Any, *arguments: Any, **named: Any) -> Any:
        with journal.doing("download", str(source), _BY, swallows=True):
            return made(source, *arguments, **named)

    return reported
