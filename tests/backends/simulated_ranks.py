"""Ranks of one group as processes of this machine that share memory, for Triton kernels in its interpreter.

A rank is a child of this process, so that it has the same addresses and need not import anything again.

The interpreter copies two bytes by C's memcpy, which may read them one at a time while another rank writes both, as no
GPU does: a value then has one byte of the empty slot (seen once in ten runs). So ranks read what
is volatile until they read the same twice.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton.runtime.interpreter as interpreter

from kernelhub.backends.shared.slot_memory import SETS, UNIT, Workspace, slots_bytes


class Group(SimpleNamespace):
    """What kernels ask of a process group. Adapters keep weak references to it."""


GROUP: Any = Group(group_name="simulated")
_ANSWER_BYTES = 1 << 16


class Ranks:
    """Workspaces of ranks in memory that children of this process share.

    Attributes:
        memories: of each rank.
        workspaces: of each rank.
    """

    def __init__(self, world_size: int, slot_bytes: int) -> None:
        capacity = -(-slot_bytes // UNIT)
        size = slots_bytes(world_size, capacity)
        self.memories = [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) for _ in range(world_size)]
        addresses = [memory.data_ptr() for memory in self.memories]
        self.workspaces = [Workspace(rank, memory, addresses, capacity) for rank, memory in enumerate(self.memories)]

    def are_empty(self) -> bool:
        """Whether slots are empty between calls: of those that are used in turn all but one set."""
        for workspace, memory in zip(self.workspaces, self.memories, strict=True):
            behind = workspace.turn_slots[0] - workspace.slots[0]
            used = [bool((part != 0xFF).any()) for part in memory[behind:].chunk(SETS)]
            if sum(used) > 1 or not bool((memory[:behind] == 0xFF).all()):
                return False
        return True


def run_ranks(act: Callable[[int], Any], world_size: int, limit_s: float = 60.0) -> list[Any]:
    """What `act(rank)` gave in each child, as JSON; its traceback if it raised; None if it did not end in time."""
    answers = [mmap.mmap(-1, _ANSWER_BYTES) for _ in range(world_size)]
    waiting = {_child(act, rank, answer) for rank, answer in enumerate(answers)}
    until = time.monotonic() + limit_s
    while waiting and time.monotonic() < until:
        waiting -= {child for child in waiting if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.01)
    for child in waiting:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return [json.loads(answer[:].rstrip(b"\0") or b"null") for answer in answers]


def _child(act: Callable[[int], Any], rank: int, answer: mmap.mmap) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about threads: the child starts none
        child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        _read_whole_values()
        said = json.dumps(act(rank))
    except BaseException:
        said = json.dumps(traceback.format_exc()[-_ANSWER_BYTES // 4 :])
    try:
        answer[: len(said)] = said.encode()
    finally:
        os._exit(0)


def _read_whole_values() -> None:
    builder = interpreter.InterpreterBuilder
    load = builder.create_masked_load

    def load_whole(self: Any, *arguments: Any) -> Any:
        read = load(self, *arguments)
        is_volatile = arguments[-1]
        while is_volatile:
            before, read = read, load(self, *arguments)
            is_volatile = read.data.tobytes() != before.data.tobytes()
        return read

    builder.create_masked_load = load_whole
