"""The child process in which kernels that may end it are verified: one line of JSON per case and per reply.

`evidence.apart` starts it. Replies go to the original standard output, through a separate descriptor. Output of a
kernel is discarded, and its standard input is empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.evidence.ahead import compile_ahead
from kernelhub.evidence.call import OutOfMemory, Unavailable
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.checks import DeviceUnusable, Subject
from kernelhub.evidence.layers import take_over
from kernelhub.evidence.results import Check
from kernelhub.evidence.serving import serving_case
from kernelhub.ops.case import Case

_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG, linux/prctl.h


def main() -> None:
    """Process cases until the input ends."""
    process = os.getpid()
    _end_with_parent()
    orders, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    take_over(json.loads(sys.argv[2]))
    _say(answers, {"ready": process})
    for line in orders:
        order = json.loads(line)
        answer = _answer(order)
        if os.getpid() != process:  # the kernel forked, and this is its child
            os._exit(0)
        _say(answers, {"number": order["number"], **answer})


def _say(answers: Any, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _answer(order: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a case. Any exception counts as the kernel's, since no other code runs here."""
    subject, case = _asked(order)
    if subject is None or case is None:
        return {"unavailable": "it is registered in the parent process, but not in the child that would run it"}
    try:
        if labels := set(order.get("ahead", ())):
            ahead = [each for each in subject.cases.cases() if each.label in labels]
            compile_ahead(subject, ahead, order["ahead_s"])
        found = subject.check(case)
    except Unavailable as error:
        return {"unavailable": str(error)}
    except OutOfMemory as error:
        return {"memory": str(error)}
    except DeviceUnusable as error:
        return {"check": error.check.to_dict(), "lost": True}
    except BaseException as error:
        figures = f"it raised {type(error).__name__}: {error}"
        return {"check": Check(case.label, "crashed", "", math.inf, figures, case.tokens).to_dict()}
    return {"check": found.to_dict()} if isinstance(found, Check) else {"refused": found}


def _asked(order: Mapping[str, Any]) -> tuple[Subject | None, Case | None]:
    _ = HUB.settings
    op = order["op"]
    kernels = {kernel.name: kernel for kernel in HUB.registry.candidates(op).kernels}
    kernel = kernels.get(order["kernel"])
    if kernel is None:
        return None, None
    subject = Subject(HUB.function(op), kernel, CASES[op], torch.device(order["device"]))
    if "serving" in order:
        return subject, serving_case(order["serving"])
    return subject, next((case for case in subject.cases.cases() if case.label == order["case"]), None)


def _end_with_parent() -> None:
    """Let the system end this process if its parent is killed while a kernel hangs here."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
