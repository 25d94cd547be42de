"""Telling of what Triton compiles, loads and tunes, by its own functions that a cached launch never enters.

`triton.compiler.compile` is what a jitted function calls on its first launch of a variant, whether it then compiles
or reads its cache on disk, which Triton reports to a listener; 3.4 to 3.9 look it up there.
`knobs.runtime.jit_cache_hook` would be the public place, but having it set makes Triton turn all constants into JSON
first, which fails for kernels that take others as arguments (3.4). Loading onto the device has a public hook in 3.6
and later, none in 3.4, where it goes untold.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from typing import Any

from kernelhub.dispatch.work import Journal

_BY = "triton"


def watch(module: str, journal: Journal) -> None:
    """Hook Triton; `module` is its name."""
    triton: Any = sys.modules[module]
    compiler: Any = triton.compiler
    compiler.compile = _reported(compiler.compile, journal)
    compilation: Any = getattr(triton.knobs, "compilation", None)
    if hasattr(compilation, "listener"):
        compilation.listener = _listening(compilation.listener)
    runtime: Any = triton.knobs.runtime
    if hasattr(getattr(runtime, "kernel_load_start_hook", None), "add"):
        loads = _Loads(journal)
        runtime.kernel_load_start_hook.add(loads.begin)
        runtime.kernel_load_end_hook.add(loads.end)
    tuner: Any = triton.runtime.autotuner.Autotuner
    if hasattr(tuner, "_bench"):
        tuner._bench = _tuning(tuner._bench, journal)


def _reported(compile: Any, journal: Journal) -> Any:
    @functools.wraps(compile)
    def reported(src: Any, *arguments: Any, **named: Any) -> Any:
        with journal.doing("compile", _name_of(src), _BY) as doing:
            _CACHE.hit = False
            compiled = compile(src, *arguments, **named)
            if _CACHE.hit:
                doing.kind = "load"
            return compiled

    return reported


class _Cache(threading.local):
    """Whether this thread's last compilation came from Triton's cache on disk; False if Triton does not report it."""

    hit = False


_CACHE = _Cache()


def _listening(other: Any) -> Any:
    """A listener of Triton's compiler, before another's."""

    def listen(**reported: Any) -> None:
        _CACHE.hit = bool(reported.get("cache_hit"))
        if other is not None:
            other(**reported)

    return listen


def _name_of(source: Any) -> str:
    """The kernel with the dtypes of its operands; a path for one that is given as code of Triton's own."""
    function = getattr(source, "fn", None)
    if function is None:
        return str(source)
    kinds = [str(kind) for kind in source.signature.values() if kind != "constexpr"]
    return f"{function.__module__}.{function.__name__}({', '.join(kinds)})"


class _Loads(threading.local):
    """Loading a compiled kernel onto a device, which begins and ends with a hook."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._began: dict[str, float] = {}

    def begin(self, module: Any, function: Any, name: str, metadata_group: Any, hash: str, *_more: Any) -> None:
        self._journal.allow("load", name, self._journal.caller())
        self._began[hash] = time.perf_counter()

    def end(self, module: Any, function: Any, name: str, metadata_group: Any, hash: str, *_more: Any) -> None:
        start = self._began.pop(hash, None)
        if start is not None:
            self._journal.note("load", name, _BY, time.perf_counter() - start, self._journal.caller())


def _tuning(bench: Any, journal: Journal) -> Any:
    @functools.wraps(bench)
    def reported(self: Any, *arguments: Any, **named: Any) -> Any:
        with journal.doing("tune", f"{self.base_fn.__module__}.{self.base_fn.__name__}", _BY):
            return bench(self, *arguments, **named)

    return reported
