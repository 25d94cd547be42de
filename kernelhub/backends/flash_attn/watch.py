"""Reports what CUTLASS' DSL compiles, the language of FlashAttention-4 and other kernels (4.6 to 4.8).

`cute.compile`, with or without options in brackets, ends in `CompileCallable._compile`, which compiles anew each time:
FlashAttention keeps what comes out, so that a call it has compiled for never enters it. A function that is decorated
and called as it is reaches `BaseDSL.compile_and_cache` where the DSL has not compiled it before. With
``FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1`` FlashAttention first looks on disk, and loads by `load_module`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernelhub.dispatch.work import Journal

_BY = "cute_dsl"
_FUNCTION_NAME = 2  # of the arguments after self that `compile_and_cache` takes


class _Inside(threading.local):
    compile = False


_INSIDE = _Inside()


def watch(module: str, journal: Journal) -> None:
    """Hook `cute.compile`; `module` is the name of the module that defines its class."""
    kind: Any = sys.modules[module].CompileCallable
    kind._compile = _compiling(kind._compile, journal, lambda function, *_more, **_named: _name_of(function))


def watch_functions(module: str, journal: Journal) -> None:
    """Hook decorated functions that are called as they are; `module` is the name of the one that defines the DSL."""
    kind: Any = sys.modules[module].BaseDSL
    kind.compile_and_cache = _compiling(kind.compile_and_cache, journal, _name_of_call)


def watch_loads(module: str, journal: Journal) -> None:
    """Hook the loading of compiled kernels; `module` is the name of the module with the load function."""
    holder: Any = sys.modules[module]
    load = holder.load_module

    @functools.wraps(load)
    def reported(file_path: Any, *arguments: Any, **named: Any) -> Any:
        with journal.doing("load", Path(file_path).name, _BY):
            return load(file_path, *arguments, **named)

    holder.load_module = reported


def _compiling(compile: Any, journal: Journal, name_of: Callable[..., str]) -> Any:
    @functools.wraps(compile)
    def reported(self: Any, *arguments: Any, **named: Any) -> Any:
        if _INSIDE.compile:
            return compile(self, *arguments, **named)
        with journal.doing("compile", name_of(*arguments, **named), _BY):
            _INSIDE.compile = True
            try:
                return compile(self, *arguments, **named)
            finally:
                _INSIDE.compile = False

    return reported


def _name_of(function: Any) -> str:
    """The kernel as its library names it: a function, or the class of an object that is called."""
    named = function if inspect.isroutine(function) else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _name_of_call(*arguments: Any, function_name: str = "", **_named: Any) -> str:
    return function_name or str(arguments[_FUNCTION_NAME])
