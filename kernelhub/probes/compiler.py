"""Which compilers are here: of C with Python's headers, which Triton needs at its first launch on a GPU, and of C++."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from kernelhub.probes.finding import Finding, found, lacking


def c_compiler() -> Finding:
    """The C compiler that Triton takes: CC, else gcc, else clang. It is looked up, not run."""
    remedy = "install gcc or clang, or set CC; Triton compiles its launcher with it"
    named = os.environ.get("CC")
    candidates = [named] if named is not None else ["gcc", "clang"]
    path = next((path for name in candidates if (path := shutil.which(name))), None)
    if path is None:
        where = f"CC={named} is no command" if named is not None else "neither gcc nor clang is on PATH"
        return lacking("C compiler", "compiler_missing", where, remedy)
    return found("C compiler", path, f"C compiler {path}")


def cxx_compiler() -> Finding:
    """The C++ compiler that makes kernels for CPUs: CXX, else g++, clang++ or c++. It is looked up, not run."""
    remedy = "install g++ or clang++, or set CXX; kernels for this CPU are compiled with it"
    named = os.environ.get("CXX")
    candidates = [named] if named else ["g++", "clang++", "c++"]
    path = next((path for name in candidates if (path := shutil.which(name))), None)
    if path is None:
        where = f"CXX={named} is no command" if named else "neither g++ nor clang++ is on PATH"
        return lacking("C++ compiler", "compiler_missing", where, remedy)
    return found("C++ compiler", path, f"C++ compiler {path}")


def python_headers() -> Finding:
    """Python.h of the running interpreter."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme points at a folder for local packages, where there are no headers.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    header = Path(sysconfig.get_paths(scheme=scheme)["include"], "Python.h")
    if not header.is_file():
        remedy = "install the headers of this Python, e.g. apt install python3-dev; Triton compiles against them"
        return lacking("Python headers", "headers_missing", f"there is no {header}", remedy)
    return found("Python headers", str(header), f"Python headers at {header.parent}")
