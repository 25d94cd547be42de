"""Runs several child processes, each driven by its own thread; this machine's memory and cores limit their number."""

from __future__ import annotations

import contextlib
import contextvars
import os
import queue
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from kernelhub.evidence.ahead import cores_here
from kernelhub.evidence.apart import Child
from kernelhub.warming.outcome import Peak

JOB_BYTES = 4 << 30  # most memory of nvcc and ninja for one of FlashInfer's larger modules
MAX_JOBS = "MAX_JOBS"  # of torch's and FlashInfer's ninja
RANKS = "LOCAL_WORLD_SIZE"  # as torchrun sets it

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def jobs_here(ranks: int | None = None) -> int:
    """``min(cores, free memory / 4 GB) / ranks of this node``, at least one."""
    cores = cores_here()
    free = free_bytes()
    room = cores if free is None else min(cores, free // JOB_BYTES)
    return max(1, room // max(1, ranks_here() if ranks is None else ranks))


def ranks_here() -> int:
    """Processes of one job on this node, by LOCAL_WORLD_SIZE; 1 without it."""
    said = os.environ.get(RANKS, "")
    return max(1, int(said)) if said.isdigit() else 1


def free_bytes() -> int | None:
    """Available memory: the lesser of the system's and the control group's; None if neither is known."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = _MEMINFO.read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            left = int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text())
            found.append(max(left, 0))
    return min(found, default=None)


def free_device_bytes(device: torch.device) -> int:
    """Free memory of a GPU; 0 for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


@contextlib.contextmanager
def max_jobs(jobs: int) -> Iterator[None]:
    """Set MAX_JOBS within the block, unless it is set already."""
    if MAX_JOBS in os.environ:
        yield
        return
    os.environ[MAX_JOBS] = str(jobs)
    try:
        yield
    finally:
        os.environ.pop(MAX_JOBS, None)


def peak(device: torch.device) -> Peak:
    """The peak memory so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
    return Peak(host, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0, children)


T = TypeVar("T")

_CHILD_BYTES = 16 << 30  # of a layer of experts, copies of it, and the reference's float64


def room_for_children(device: torch.device) -> int:
    """The number of processes that may verify at a time; each has its own device context and a layer's tensors."""
    if device.type != "cuda":
        return 1
    return max(1, min(jobs_here(), free_device_bytes(device) // _CHILD_BYTES))


class Crew:
    """Child processes that work on items together.

    Args:
        processes: number of children; with one, its work runs in the calling thread.

    Attributes:
        error: the exception or interrupt of a thread; no new work begins after it.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise the error of another thread."""
        if self.error is not None:
            raise self.error

    def share_out(self, items: Sequence[T], work: Callable[[T, Child], None]) -> None:
        """Run `work` on every item with a child.

        Raises:
            BaseException: the first error of `work`. Other threads end at their next `check`. A busy child is not
                killed, since its kernel would count as one that crashes.
        """
        waiting: queue.SimpleQueue[T] = queue.SimpleQueue()
        for item in items:
            waiting.put(item)
        processes = min(self.processes, len(items))
        if processes < 2:
            self._serve(waiting, work, {})
            return
        variables = {MAX_JOBS: str(max(1, jobs_here() // processes))}
        contexts = [contextvars.copy_context() for _ in range(processes)]  # settings of `use` apply in the threads too
        threads = [
            threading.Thread(target=context.run, args=(self._watched, waiting, work, variables), daemon=True)
            for context in contexts
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # returns, so that Ctrl-C is handled
        except BaseException as error:
            self.error = self.error or error
            raise
        self.check()

    def _watched(
        self, waiting: queue.SimpleQueue[T], work: Callable[[T, Child], None], variables: dict[str, str]
    ) -> None:
        try:
            self._serve(waiting, work, variables)
        except BaseException as error:  # raised in the thread that waits
            self.error = self.error or error

    def _serve(
        self, waiting: queue.SimpleQueue[T], work: Callable[[T, Child], None], variables: dict[str, str]
    ) -> None:
        with Child(variables) as child:
            while self.error is None:
                try:
                    item = waiting.get_nowait()
                except queue.Empty:
                    return
                work(item, child)
