"""Compilation of items by several child processes, which leave the results in the caches on disk.

If a child is killed, one item is lost; a single child with one job then repeats it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernelhub.warming.child import order_for
from kernelhub.warming.crew import MAX_JOBS
from kernelhub.warming.outcome import FAILED
from kernelhub.warming.ready import OUT_OF_MEMORY, Sizing
from kernelhub.warming.wanted import Item

# Isolated, with this process's own sys.path: `python -m` would look into the working directory first.
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from kernelhub.warming.child import main; main()"
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)

Done = Callable[[Item, dict[str, Any]], None]
Job = tuple[Item, str]


@dataclass
class ChildResults:
    """The results of all children.

    Attributes:
        lost: items that no child could compile, each with the reason; the parent process must not try them.
        notes: further messages.
    """

    lost: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def compile_in_children(
    jobs: Sequence[Job],
    processes: int,
    ninja_jobs: int,
    device: torch.device,
    sizing: Sizing,
    begun: Callable[[Item], None],
    done: Done,
) -> ChildResults:
    """Compile items in child processes.

    Args:
        jobs: items, each with its selected kernel.
        processes: number of children.
        ninja_jobs: MAX_JOBS of each child.
        device: device of the calls.
        sizing: sizes of the calls.
        begun: called in a thread as an item begins.
        done: called in a thread with an item and the child's result, one call at a time.
    """
    results = ChildResults()
    killed: list[Job] = []
    crew = _Compilers(device, sizing, begun, done, results)
    crew.work(jobs, processes, ninja_jobs, killed)
    if killed:
        names = ", ".join(sorted({item.op for item, _ in killed}))
        results.notes.append(f"{OUT_OF_MEMORY} ({names}); tried again alone with one job")
        again: list[Job] = []
        crew.work(killed, 1, 1, again)
        for item, _ in again:
            results.lost[item.key] = f"{OUT_OF_MEMORY}, alone and with one job too; free memory, or compile elsewhere"
    return results


class _Compilers:
    """Children and their shared state."""

    def __init__(
        self, device: torch.device, sizing: Sizing, begun: Callable[[Item], None], done: Done, results: ChildResults
    ) -> None:
        self.device, self.sizing, self.begun, self.done, self.results = device, sizing, begun, done, results
        self.guard = threading.Lock()
        self.children: set[subprocess.Popen[str]] = set()
        self.error: BaseException | None = None

    def work(self, jobs: Sequence[Job], processes: int, ninja_jobs: int, killed: list[Job]) -> None:
        """Distribute items to children until all are done; items whose child was killed are added to `killed`."""
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)
        threads = [
            threading.Thread(target=self._serve, args=(waiting, ninja_jobs, killed), daemon=True)
            for _ in range(min(processes, len(jobs)))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # returns, so that Ctrl-C is handled
        finally:
            with self.guard:
                left, self.children = self.children, set()
            for child in left:
                child.kill()
        if self.error is not None:
            raise self.error

    def _serve(self, waiting: queue.SimpleQueue[Job], ninja_jobs: int, killed: list[Job]) -> None:
        child: subprocess.Popen[str] | None = None
        try:
            while self.error is None:
                try:
                    item, kernel = waiting.get_nowait()
                except queue.Empty:
                    break
                child = child or self._started(ninja_jobs)
                self.begun(item)
                answer = _asked(child, order_for(item, kernel, self.device, self.sizing))
                if answer is None:
                    code = child.wait()
                    self._forget(child)
                    child = None
                    with self.guard:
                        if code in _KILLED:
                            killed.append((item, kernel))
                        else:
                            self.results.lost[item.key] = f"a process that compiled it ended with exit code {code}"
                elif answer["how"] == FAILED and OUT_OF_MEMORY in answer["reason"]:
                    with self.guard:
                        killed.append((item, kernel))
                else:
                    with self.guard:
                        self.done(item, answer)
        except BaseException as error:  # raised in the thread that waits
            self.error = error
        finally:
            if child is not None:
                assert child.stdin is not None
                child.stdin.close()
                child.wait()
                self._forget(child)

    def _started(self, ninja_jobs: int) -> subprocess.Popen[str]:
        environment = {**os.environ, MAX_JOBS: os.environ.get(MAX_JOBS, "") if ninja_jobs > 1 else "1"}
        if not environment[MAX_JOBS]:
            environment[MAX_JOBS] = str(ninja_jobs)
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", _CODE, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        with self.guard:
            self.children.add(child)
        return child

    def _forget(self, child: subprocess.Popen[str]) -> None:
        with self.guard:
            self.children.discard(child)


def _asked(child: subprocess.Popen[str], order: str) -> dict[str, Any] | None:
    """A child's result; None if it ended instead."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(order + "\n")
        child.stdin.flush()
    except BrokenPipeError:
        return None
    line = child.stdout.readline()
    if not line.endswith("\n"):
        return None
    answer: dict[str, Any] = json.loads(line)
    return answer
