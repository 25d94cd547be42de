"""Checks in a child process: a kernel that crashes, hangs or exits ends only that process.

One child serves a run. It is restarted only after a kernel has ended it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Literal

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.evidence.call import OutOfMemory, Unavailable
from kernelhub.evidence.checks import DeviceUnusable, Subject
from kernelhub.evidence.layers import plain_layers
from kernelhub.evidence.results import Check
from kernelhub.ops.case import Case
from kernelhub.probes.toolchain import end_group

_START_TIMEOUT_S = 300.0  # torch from a cold, shared disk
_PAUSE_S = 0.1
_MOST_BYTES = 1 << 20
_OURS = ("", "torch", "triton")  # packages whose kernels are kernelhub's own, or torch's
# sys.path is this process's own: `python -m` and `-c` without -I look into the working directory first.
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from kernelhub.evidence.child import main; main()"

Which = Literal["all", "foreign"]
_which: ContextVar[Which] = ContextVar("kernels verified in a child", default="foreign")


class Ended(Exception):
    """The kernel ended the child, or the child had to be killed: the kernel gets no further checks."""

    def __init__(self, check: Check) -> None:
        self.check = check
        super().__init__(check.figures)


@contextlib.contextmanager
def all_apart() -> Iterator[None]:
    """Within the block every kernel is verified in a child, also kernelhub's own."""
    token = _which.set("all")
    try:
        yield
    finally:
        _which.reset(token)


def goes_apart(kernel: Kernel) -> bool:
    """Whether a kernel is verified in a child: kernels of libraries and third parties; on the command line, all."""
    if not can_go_apart(kernel):
        return False
    registered = HUB.registry.backends[kernel.backend]
    foreign = not registered.origin.startswith("kernelhub.backends.")
    library = registered.backend is not None and registered.backend.package not in _OURS
    return foreign or library or _which.get() == "all"


def can_go_apart(kernel: Kernel) -> bool:
    """Whether a child has the kernel: one that was registered at run time exists only in this process."""
    return not HUB.is_of_this_process(kernel.backend)


class Child:
    """The child process of a run, started at its first check.

    Args:
        variables: environment variables in addition to this process's own.
    """

    def __init__(self, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._number = 0
        self._served: set[tuple[str, str]] = set()  # by the current process

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check(self, subject: Subject, case: Case, ahead: Sequence[Case] = ()) -> Check | str:
        """Check one case, as `Subject.check` does. What `ahead` needs is compiled before.

        Raises:
            Ended: the kernel crashed, hung or exited.
            Unavailable, OutOfMemory, DeviceUnusable: as `Subject.check`.
        """
        key = (subject.kernel.op, subject.kernel.name)
        others = bool(self._served - {key})
        try:
            return self._ask(subject, case, ahead)
        except Ended as ended:
            if ended.check.code == "hung" or not others:
                raise
        return self._ask(subject, case, ahead)  # an earlier kernel may have corrupted the process

    def close(self) -> None:
        """End the process and its children."""
        process, self._process, self._buffer, self._served = self._process, None, b"", set()
        if process is not None:
            end_group(process.pid)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()
            process.wait()

    def _ask(self, subject: Subject, case: Case, ahead: Sequence[Case]) -> Check | str:
        timeout_s = HUB.settings["KERNELHUB_VERIFY_TIMEOUT_S"]
        process = self._started()
        self._number += 1
        self._served.add((subject.kernel.op, subject.kernel.name))
        order = {
            "number": self._number,
            "op": subject.kernel.op,
            "kernel": subject.kernel.name,
            "device": str(subject.device),
            "case": case.label,
            **({} if case.serving is None else {"serving": dict(case.serving)}),
            **({"ahead": [each.label for each in ahead], "ahead_s": timeout_s / 2} if ahead else {}),
        }
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
        answer = self._answer(timeout_s)
        if isinstance(answer, str):
            code = "hung" if answer.startswith("it did not end") else "crashed"
            raise Ended(Check(case.label, code, "", math.inf, answer, case.tokens))
        if answer.get("number") != self._number:
            self.close()
            raise Ended(Check(case.label, "crashed", "", math.inf, "it corrupted its process's output", case.tokens))
        return self._meant(answer)

    def _meant(self, answer: dict[str, Any]) -> Check | str:
        """The result of a reply."""
        if "refused" in answer:
            return str(answer["refused"])
        if "unavailable" in answer:
            raise Unavailable(str(answer["unavailable"]))
        if "memory" in answer:
            raise OutOfMemory(str(answer["memory"]))
        check = Check.from_dict(answer["check"])
        if answer.get("lost"):
            self.close()  # the next kernel gets a process with a working device
        if check.code == "crashed":
            raise Ended(check)
        if answer.get("lost"):
            raise DeviceUnusable(check)
        return check

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _CODE, json.dumps(sys.path), json.dumps(plain_layers())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a kernel may print without limit
            start_new_session=True,
            env={**os.environ, **self._variables},
        )
        ready = self._answer(_START_TIMEOUT_S)
        if isinstance(ready, str):
            raise Unavailable(f"the child process does not start: {ready}")
        return self._process

    def _answer(self, timeout_s: float) -> dict[str, Any] | str:
        """The child's next line as an object, or, after it ended, a sentence that says how."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        descriptor, ends = process.stdout.fileno(), time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        while b"\n" not in self._buffer:
            gone = process.poll() is not None  # checked first, so that earlier output is still read
            if poll.poll(0 if gone else _PAUSE_S * 1000):
                part = os.read(descriptor, 1 << 16)
                self._buffer += part
                if part and len(self._buffer) < _MOST_BYTES:
                    continue
                if part:
                    self.close()
                    return "it wrote to the reply channel of its process"
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
                gone = True
            if gone:
                said = _how_it_ended(process.poll())
                self.close()
                return said
            if time.monotonic() > ends:
                self.close()
                return f"it did not end within {timeout_s:g} s (KERNELHUB_VERIFY_TIMEOUT_S)"
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            self.close()
            return "it wrote to the reply channel of its process"
        return answer


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "it closed the reply channel of its process"
    if code >= 0:
        return f"it ended its process with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    memory = ", as the system does without free memory" if -code == signal.SIGKILL else ""
    return f"{name} ended its process{memory}"
