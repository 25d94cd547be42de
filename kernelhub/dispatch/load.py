"""Importing foreign code so that it can neither crash nor hang the caller.

The import runs in a thread of its own: whatever it raises, SystemExit included, becomes a
`LoadFailure`, and one that does not return in time is left behind.
"""

from __future__ import annotations

import contextvars
import importlib
import sys
import threading
from types import ModuleType
from typing import Any

# What the dynamic linker says of a compiled library, and what is said of a compiler that was run; the code of such a
# failure, and what helps.
_KINDS = (
    (
        ("undefined symbol", "symbol not found"),
        "load_symbol",
        "it was compiled for another torch, or for another version of what it names: install the build for this one",
    ),
    (
        ("cannot open shared object file", "image not found"),
        "load_library",
        "install the library that it names, in that version, or the build of the package for the CUDA that is here",
    ),
    (
        ("wrong ELF class", "invalid ELF header", "file too short", "cannot read file data", "GLIBC", "CXXABI"),
        "load_file",
        "it is damaged, or was compiled for another system or processor: install the package anew, for this one",
    ),
    (
        ("Killed signal", "(exit 137)", "(exit -9)"),
        "load_killed",
        "something ended the compiler, most often for lack of memory: see dmesg, and the limit of the container",
    ),
    (
        ("timed out after",),
        "load_hangs",
        "look at what the program that it names waits for: a file system that is gone, a wrapper, a licence",
    ),
)

IMPORTING: set[int] = set()  # the threads that import now; a child that is forked meanwhile has none of them


class LoadFailure(Exception):
    """An import that failed, with a stable code, a reason and a remedy: each code of `_KINDS` has one of its own."""

    def __init__(self, code: str, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.remedy = remedy


def load_attribute(target: str, timeout_s: float) -> Any:
    """The attribute that ``"module:attribute"`` names.

    Raises:
        LoadFailure: ``load_failed`` (the import raised, or there is no such attribute), ``load_timeout``,
            or one of `_KINDS`, by what it raised.
    """
    name, _, attribute = target.partition(":")
    module = load_module(name, timeout_s)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise LoadFailure("load_failed", f"{name} has no attribute {attribute}", "reinstall its package") from None


def is_imported(name: str) -> bool:
    """Has a module been imported to its end?"""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def load_module(name: str, timeout_s: float) -> ModuleType:
    """Import a module, waiting at most `timeout_s`."""
    if is_imported(name):
        return sys.modules[name]
    outcome: list[ModuleType | BaseException] = []

    def work() -> None:
        IMPORTING.add(threading.get_ident())
        try:
            outcome.append(importlib.import_module(name))
        except BaseException as error:  # SystemExit from a foreign package must not end the process
            outcome.append(error)
        finally:
            IMPORTING.discard(threading.get_ident())

    inside = contextvars.copy_context()  # what the import calls is called on behalf of this thread: see `making`
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
    remedy = "mend or remove the package it comes from, or disable its backend"
    raise failure_of(f"importing {name}", result, remedy) from result


def failure_of(doing: str, error: BaseException, remedy: str) -> LoadFailure:
    """What an error means, which was raised while something was done; `remedy` is for an error of no known kind."""
    said = str(error)
    kinds = ((code, of_kind) for phrases, code, of_kind in _KINDS if any(phrase in said for phrase in phrases))
    code, remedy = next(kinds, ("load_failed", remedy))
    return LoadFailure(code, f"{doing} raised {type(error).__name__}: {said}", remedy)
