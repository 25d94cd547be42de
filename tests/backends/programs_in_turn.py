"""Programs of one grid that wait for each other, in Triton's interpreter, which runs one after the other.

Each program has a thread of its own. One of them runs at a time, chosen by chance, until it ends or has read something
volatile some times, as programs do that wait. So one may end before another has begun.
"""

from __future__ import annotations

import inspect
import random
import threading
from typing import Any

import triton.runtime.interpreter as interpreter


def patch(monkeypatch: Any) -> None:
    """Run the programs of every grid in turn."""
    call = interpreter.GridExecutor.__call__

    def in_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = self.fn
        self.fn = _InTurn(kernel)
        try:
            return call(self, *args, **kwargs)
        finally:
            self.fn = kernel

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", in_turn)
    builder = interpreter.InterpreterBuilder
    load = builder.create_masked_load

    def load_in_turn(self: Any, *arguments: Any) -> Any:
        if arguments[-1]:  # is volatile
            give_way()
        return load(self, *arguments)

    monkeypatch.setattr(builder, "create_masked_load", load_in_turn)


_running = threading.local()
_chance = random.Random(0)
_GIVES_WAY = 0.2


def give_way() -> None:
    """Let the other programs of the grid run, if this is one of several."""
    program = getattr(_running, "program", None)
    if program is not None and _chance.random() < _GIVES_WAY:
        program.turn.release()
        program.may_run.acquire()
        interpreter.interpreter_builder.set_grid_idx(*program.place)


def program() -> int:
    """Which program of the grid runs."""
    return int(interpreter.interpreter_builder.grid_idx[0])


class _Program:
    def __init__(self, place: tuple[int, int, int]) -> None:
        self.place = place
        self.may_run, self.turn = threading.Semaphore(0), threading.Semaphore(0)
        self.error: BaseException | None = None
        self.ended = False


class _InTurn:
    """Collects the programs of a grid, and runs them with the last one."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.__signature__ = inspect.signature(kernel)
        self.__globals__ = kernel.__globals__
        self.__name__ = kernel.__name__
        self._programs: list[_Program] = []

    def __call__(self, **arguments: Any) -> None:
        builder = interpreter.interpreter_builder
        self._programs.append(_Program(tuple(builder.grid_idx)))
        count = 1
        for size in builder.grid_dim:
            count *= size
        if len(self._programs) < count:
            return
        threads = [threading.Thread(target=self._run, args=(one, arguments), daemon=True) for one in self._programs]
        for thread in threads:
            thread.start()
        running = list(self._programs)
        while running:
            program = _chance.choice(running)
            builder.set_grid_idx(*program.place)
            program.may_run.release()
            program.turn.acquire()
            if program.error is not None:
                raise program.error
            if program.ended:
                running.remove(program)

    def _run(self, program: _Program, arguments: dict[str, Any]) -> None:
        _running.program = program
        program.may_run.acquire()
        interpreter.interpreter_builder.set_grid_idx(*program.place)
        try:
            self._kernel(**arguments)
        except BaseException as error:
            program.error = error
        program.ended = True
        program.turn.release()
