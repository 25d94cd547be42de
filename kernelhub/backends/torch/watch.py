"""Reports what torch.compile compiles. No op needs it, so it is counted and not rejected."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from kernelhub.dispatch.work import Journal


class _Began(threading.local):
    def __init__(self) -> None:
        self.times: list[float] = []


def watch(module: str, journal: Journal) -> None:
    """Hook torch.compile; `module` is the name of Dynamo's module of callbacks."""
    handler: Any = getattr(sys.modules[module], "callback_handler", None)
    if handler is None or not hasattr(handler, "register_start_callback"):
        return  # torch before 2.3
    began = _Began()

    def start(*_reported: Any) -> None:
        began.times.append(time.perf_counter())

    def end(*_reported: Any) -> None:
        if began.times:
            seconds = time.perf_counter() - began.times.pop()
            journal.note("compile", "a graph", "torch.compile", seconds, journal.caller())

    def register() -> None:
        handler.register_start_callback(start)
        handler.register_end_callback(end)

    forget = handler.clear

    def clear() -> None:  # what torch._dynamo.reset() calls, which is no override to lose the count
        forget()
        register()

    handler.clear = clear
    register()
