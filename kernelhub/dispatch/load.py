"""Imports of foreign code that neither crash nor hang the caller.

An import runs in its own thread. Every exception, including SystemExit, becomes a `LoadFailure`. An import that does
not return in time is abandoned.
"""

from __future__ import annotations

import contextvars
import importlib
import sys
import threading
from types import ModuleType
from typing import Any

# Phrases in errors of the dynamic linker and of compilers, with the code of such a failure and its remedy.
_KINDS = (
    (
        ("undefined symbol", "symbol not found"),
        "load_symbol",
        "it was compiled for another version of torch or of the library in the message: install the matching build",
    ),
    (
        ("cannot open shared object file", "image not found"),
        "load_library",
        "install the library in the message, in that version, or the package's build for the installed CUDA",
    ),
    (
        ("wrong ELF class", "invalid ELF header", "file too short", "cannot read file data", "GLIBC", "CXXABI"),
        "load_file",
        "it is damaged, or was compiled for another system or processor: reinstall the package for this one",
    ),
    (
        ("Killed signal", "(exit 137)", "(exit -9)"),
        "load_killed",
        "the compiler was killed, usually because memory ran out: see dmesg and the memory limit of the container",
    ),
    (
        ("timed out after",),
        "load_hangs",
        "check what the program in the message waits for: an unreachable file system, a compiler wrapper, a licence",
    ),
)

IMPORTING: set[int] = set()  # threads that are importing; a forked child has none of them


class LoadFailure(Exception):
    """An import or adapter that failed, with a stable code, a reason and a remedy."""

    def __init__(self, code: str, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.remedy = remedy


def load_attribute(target: str, timeout_s: float) -> Any:
    """The attribute that ``"module:attribute"`` names.

    Raises:
        LoadFailure: with code ``load_failed`` (the import raised, or the attribute is missing), ``load_timeout``, or a
            code of `_KINDS` that matches the error.
    """
    name, _, attribute = target.partition(":")
    module = load_module(name, timeout_s)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise LoadFailure("load_failed", f"{name} has no attribute {attribute}", "reinstall its package") from None


def is_imported(name: str) -> bool:
    """Whether a module is completely imported."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def load_module(name: str, timeout_s: float) -> ModuleType:
    """Import a module, and wait at most `timeout_s`; raises as `load_attribute`."""
    if is_imported(name):
        return sys.modules[name]
    outcome: list[ModuleType | BaseException] = []

    def work() -> None:
        IMPORTING.add(threading.get_ident())
        try:
            outcome.append(importlib.import_module(name))
        except BaseException as error:  # a SystemExit of a foreign package must not end the process
            outcome.append(error)
        finally:
            IMPORTING.discard(threading.get_ident())

    inside = contextvars.copy_context()  # calls from the import count as calls of this thread: see `making`
    thread = threading.Thread(target=inside.run, args=(work,), name=f"import {name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        raise LoadFailure(
            "load_timeout",
            f"importing {name} did not return within {timeout_s:g} s",
            "disable its backend, or raise KERNELHUB_LOAD_TIMEOUT_S",
        )
    result = outcome[0]
    if isinstance(result, ModuleType):
        return result
    remedy = "fix or remove its package, or disable its backend"
    raise failure_of(f"importing {name}", result, remedy) from result


def failure_of(doing: str, error: BaseException, remedy: str) -> LoadFailure:
    """The `LoadFailure` of an error that `doing` raised; `remedy` is for errors that match none of `_KINDS`."""
    text = str(error)
    kinds = ((code, of_kind) for phrases, code, of_kind in _KINDS if any(phrase in text for phrase in phrases))
    code, remedy = next(kinds, ("load_failed", remedy))
    return LoadFailure(code, f"{doing} raised {type(error).__name__}: {text}", remedy)
