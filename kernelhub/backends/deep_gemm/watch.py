"""Reports what DeepGEMM compiles: through its Python JIT up to 1.0, and since then through a wrapper of nvcc."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernelhub.backends.deep_gemm.nvcc import VARIABLE, StandIn
from kernelhub.dispatch.work import Journal

_log = logging.getLogger("kernelhub.watch")
_stand_ins: dict[str, StandIn] = {}  # by the library's module name


def watch(module: str, journal: Journal) -> None:
    """Hook a copy of the library; `module` is its name."""
    compiler: Any = sys.modules.get(f"{module}.jit.compiler")
    if compiler is not None:
        _watch_python(compiler, journal)
        return
    library = sys.modules[module]
    nvcc = os.environ.get(VARIABLE) or _nvcc_of(library)
    if nvcc is None or not Path(nvcc).is_file():
        return  # nothing can be compiled
    standing = next((one for one in _stand_ins.values() if str(one.path) == nvcc), None)
    if standing is not None:  # another copy's, or this one's under its other name
        _stand_ins[library.__name__] = standing
        return
    try:
        made = _stand_ins[library.__name__] = StandIn(nvcc, journal)
    except OSError as error:
        _log.warning("what DeepGEMM compiles is neither counted nor rejected after seal(): %s", error)
        return
    os.environ[VARIABLE] = str(made.path)  # read when the library compiles for the first time


def watched(module: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the library as kernelhub calls it."""
    stand_in = _stand_ins.get(module)
    return made if stand_in is None else stand_in.around(made)


def _watch_python(compiler: Any, journal: Journal) -> None:
    """Wrap `compile` of each compiler (1.0), or what the only one runs nvcc by (before)."""
    classes = [
        one
        for one in vars(compiler).values()
        if isinstance(one, type) and isinstance(vars(one).get("compile"), classmethod)
    ]
    for kind in classes:
        named: Any = kind
        named.compile = classmethod(_compiling(vars(kind)["compile"].__func__, journal))
    if not classes:
        compiler.subprocess = _Subprocess(compiler.subprocess, journal)


def _compiling(made: Any, journal: Journal) -> Any:
    @functools.wraps(made)
    def reported(kind: Any, name: str, *arguments: Any, **named: Any) -> Any:
        with journal.doing("compile", name, "deep_gemm"):
            return made(kind, name, *arguments, **named)

    return reported


class _Subprocess:
    """The module subprocess, with `check_call` and `run` reported."""

    def __init__(self, real: Any, journal: Journal) -> None:
        self._real = real
        self._journal = journal

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if name not in ("check_call", "run"):
            return value

        def reported(command: Any, *arguments: Any, **named: Any) -> Any:
            source = next((str(word) for word in command if str(word).endswith(".cu")), str(command[0]))
            with self._journal.doing("compile", "/".join(Path(source).parts[-2:]), "deep_gemm"):
                return value(command, *arguments, **named)

        return reported


def _nvcc_of(library: Any) -> str | None:
    """The nvcc that the library would run: that of the toolkit which it found."""
    for name in ("find_cuda_home", "_find_cuda_home"):
        find = getattr(library, name, None)
        if find is not None:
            return str(Path(find()) / "bin" / "nvcc")
    home = os.environ.get("CUDA_HOME")
    return None if home is None else str(Path(home) / "bin" / "nvcc")
