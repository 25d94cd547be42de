"""Checks in this process with a time-out, in a thread, so that a hanging kernel does not block the caller.

The thread of a hanging kernel cannot be ended. It remains, with its memory and its device. Only a child process can be
ended (see `apart`), also if its kernel keeps the interpreter's lock.
"""

from __future__ import annotations

import contextvars
import math
import os
import queue
import threading
from collections.abc import Callable, Sequence

import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.evidence.ahead import compile_ahead
from kernelhub.evidence.apart import Ended
from kernelhub.evidence.checks import Subject
from kernelhub.evidence.results import Check
from kernelhub.ops.case import Case

_Answer = Check | str | BaseException


class Here:
    """The thread of a run, started at its first check.

    Attributes:
        hung: whether a kernel did not return.
    """

    def __init__(self) -> None:
        self.hung = False
        self._orders: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def check(self, subject: Subject, case: Case, ahead: Sequence[Case] = ()) -> Check | str:
        """Check one case, as `Subject.check` does, and with its errors. What `ahead` needs is compiled before.

        Raises:
            Ended: the kernel hung.
        """
        timeout_s = HUB.settings["KERNELHUB_VERIFY_TIMEOUT_S"]
        answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        context = contextvars.copy_context()
        index = torch.cuda.current_device() if subject.device.type == "cuda" else -1

        def ask() -> None:
            try:
                if index >= 0:
                    torch.cuda.set_device(index)  # each thread has its own current device
                context.run(compile_ahead, subject, ahead, timeout_s / 2)
                answers.put(context.run(subject.check, case))
            except BaseException as error:
                answers.put(error)

        self._started().put(ask)
        try:
            answer = answers.get(timeout=timeout_s)
        except queue.Empty:
            self.hung = True
            self.close()
            figures = f"it did not end within {timeout_s:g} s (KERNELHUB_VERIFY_TIMEOUT_S), and its thread still runs"
            raise Ended(Check(case.label, "hung", "", math.inf, figures, case.tokens)) from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        """Let the thread end after its current check."""
        orders, self._orders = self._orders, None
        if orders is not None:
            orders.put(None)

    def _started(self) -> queue.SimpleQueue[Callable[[], None] | None]:
        if self._orders is None:
            self._orders = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._orders,), name="kernelhub verify", daemon=True).start()
        return self._orders


def _serve(orders: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    process = os.getpid()
    while (order := orders.get()) is not None:
        order()
        if os.getpid() != process:  # the kernel forked, and this is its child
            os._exit(0)
