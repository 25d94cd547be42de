"""The process in which kernels are verified that may end it: it reads cases and answers, a line of JSON each.

`evidence.apart` starts it. Answers go to the standard output that it was started with, through a descriptor of their
own; what a kernel prints goes nowhere, and what it reads is empty.
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
from kernelhub.evidence.call import OutOfMemory, Unavailable
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.checks import DeviceLost, Subject
from kernelhub.evidence.layers import take_over
from kernelhub.evidence.results import Check
from kernelhub.evidence.serving import serving_case
from kernelhub.ops.case import Case

_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG, linux/prctl.h


def main() -> None:
    """Serve cases until there are no more."""
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
    """What asking a case gave; whatever the kernel raises is its doing, since nobody else ends this process so."""
    subject, case = _asked(order)
    if subject is None or case is None:
        return {"unavailable": "it is registered in the process that verifies, and not in the one that would ask it"}
    try:
        found = subject.check(case)
    except Unavailable as error:
        return {"unavailable": str(error)}
    except OutOfMemory as error:
        return {"memory": str(error)}
    except DeviceLost as error:
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
    """Have the system end this process if the one that started it is killed while a kernel hangs here."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
