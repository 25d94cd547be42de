"""Several child processes in which kernels are verified at a time, each asked by a thread of its own."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from kernelhub.evidence.apart import Child
from kernelhub.warming.memory import MAX_JOBS, free_device_bytes, jobs_here

T = TypeVar("T")

_CHILD_BYTES = 16 << 30  # of a layer of experts, copies of it, and the reference's float64


def room_for_children(device: torch.device) -> int:
    """How many processes may verify at a time: each has a context of its own on the device, and a layer's tensors."""
    if device.type != "cuda":
        return 1
    return max(1, min(jobs_here(), free_device_bytes(device) // _CHILD_BYTES))


class Crew:
    """Children, and whether work goes on.

    Args:
        processes: how many; with one, its work is done in the thread that asks for it.

    Attributes:
        error: what a thread failed with, or was interrupted by; then nothing new is begun.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise what another thread failed with."""
        if self.error is not None:
            raise self.error

    def share_out(self, items: Sequence[T], work: Callable[[T, Child], None]) -> None:
        """Have every item worked on with a child.

        Raises:
            BaseException: what `work` raised first. The others end where they `check`; a child that is asked meanwhile
                is not killed, since its kernel would be taken for one that crashes.
        """
        waiting: queue.SimpleQueue[T] = queue.SimpleQueue()
        for item in items:
            waiting.put(item)
        processes = min(self.processes, len(items))
        if processes < 2:
            self._serve(waiting, work, {})
            return
        variables = {MAX_JOBS: str(max(1, jobs_here() // processes))}
        contexts = [contextvars.copy_context() for _ in range(processes)]  # what `use` says here counts there
        threads = [
            threading.Thread(target=context.run, args=(self._watched, waiting, work, variables), daemon=True)
            for context in contexts
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # so that Ctrl-C is heard
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
