"""A wrapper of nvcc that reports what DeepGEMM's compiled JIT compiles, and can block it.

Since 2.0 DeepGEMM runs nvcc out of C++, where nothing can be wrapped; but it takes another one from
DG_JIT_NVCC_COMPILER. The wrapper is a shell script of this process. It runs the real nvcc and notes the time, or exits
with an error where kernelhub is sealed and the call is kernelhub's own; DeepGEMM then raises before it launches. Three
bytes of shared memory say so: whose call it is, whether the script ran, and whether kernelhub is sealed. `--version`
goes straight through, so that the names of cached kernels stay as they are.
"""

from __future__ import annotations

import atexit
import functools
import mmap
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.work import Journal
from kernelhub.probes.toolchain import run

VARIABLE = "DG_JIT_NVCC_COMPILER"
_OURS, _RAN, _SEALED = range(3)
_REFUSED = 97
_TIMEOUT_S = 60.0
_SCRIPT = """#!/bin/sh
case "$1" in --version) exec {nvcc} "$@";; esac
read -r ours ran sealed <<END
$(od -An -N3 -tu1 {flags})
END
printf '\\001' | dd of={flags} bs=1 seek=1 conv=notrunc 2>/dev/null
if [ "$ours" = 1 ] && [ "$sealed" = 1 ]; then
  echo "0 {refused} $*" >> {log}
  echo "kernelhub is sealed: this would be compiled while serving" >&2
  exit {refused}
fi
start=$(date +%s%N)
{nvcc} "$@"
code=$?
echo "$(( $(date +%s%N) - start )) $code $*" >> {log}
exit $code
"""


class StandIn:
    """The script and its log.

    Args:
        nvcc: path of the real one.
        journal: records what was compiled.

    Raises:
        OSError: the script cannot be created, or does not run in its folder.
    """

    def __init__(self, nvcc: str, journal: Journal) -> None:
        self._journal = journal
        self._folder = Path(tempfile.mkdtemp(prefix="kernelhub-nvcc-"))
        self._process = os.getpid()
        atexit.register(self._remove)
        self._log = self._folder / "log"
        flags = self._folder / "flags"
        flags.write_bytes(bytes(3))
        with flags.open("r+b") as file:
            self._flags = mmap.mmap(file.fileno(), 3)
        self.path = self._folder / "nvcc"
        quoted = {
            name: shlex.quote(str(value)) for name, value in (("nvcc", nvcc), ("flags", flags), ("log", self._log))
        }
        self.path.write_text(_SCRIPT.format(refused=_REFUSED, **quoted))
        self.path.chmod(0o700)
        try:
            run([self.path, "--version"], _TIMEOUT_S).check_returncode()
        except (OSError, subprocess.SubprocessError) as error:
            self._remove()
            raise OSError(f"{self.path} does not run: {error}") from error
        self.tell(GATE.sealed)
        GATE.changed.append(self.tell)

    def tell(self, sealed: bool) -> None:
        """Pass the seal state to the script."""
        self._flags[_SEALED] = sealed

    def around(self, made: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the library, marked as a call of kernelhub; about 0.1 us slower than the function."""
        flags, tell = self._flags, self._tell

        @functools.wraps(made)
        def ours(*arguments: Any, **named: Any) -> Any:
            flags[_OURS] = 1
            try:
                return made(*arguments, **named)
            except Exception as error:
                if flags[_RAN]:
                    tell(error)
                raise
            finally:
                flags[_OURS] = 0
                if flags[_RAN]:
                    tell(None)

        return ours

    def _tell(self, error: Exception | None) -> None:
        """Report the script's notes; raise an error for a call that it refused."""
        self._flags[_RAN] = 0
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        caller = self._journal.caller()
        for line in lines:
            nanoseconds, code, command = line.split(" ", 2)
            name = _kernel_of(command)
            if int(code) == _REFUSED:
                if error is not None:
                    self._journal.allow("compile", name, caller)
                continue
            self._journal.note("compile", name, "deep_gemm", int(nanoseconds) / 1e9, caller)

    def _remove(self) -> None:
        if os.getpid() == self._process:  # a forked child leaves it to its parent
            shutil.rmtree(self._folder, ignore_errors=True)


def _kernel_of(command: str) -> str:
    """The source that is compiled; the library names it alike for all kernels, so with its folder."""
    words = [Path(word) for word in command.split() if word.endswith(".cu")]
    return "/".join(words[0].parts[-2:]) if words else command[:80]
