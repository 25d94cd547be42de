"""What a kernel compiles for its cases, compiled by several threads before the first case runs.

A process checks one case after the other, so that what each compiles would be waited for in turn. On an H200 the quick
cases of `cuda.paged_decode` took more than the 20 s that they have, so that 13 of 56 were left out.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from kernelhub.dispatch.bound import make_adapter
from kernelhub.dispatch.hub import HUB
from kernelhub.evidence.checks import Subject
from kernelhub.ops.case import Case

_MOST_THREADS = 8  # a compile of NVRTC holds some 100 MB


def compile_ahead(subject: Subject, cases: Iterable[Case], limit_s: float) -> int:
    """Make the adapters of a kernel that `compiles_when_made` for these cases; return for how many problems.

    No error is raised: an adapter that cannot be made is made again by its case, which reports the error. After
    `limit_s` the cases begin without what is not compiled.
    """
    kernel, threads = subject.kernel, min(_MOST_THREADS, cores_here())
    if not kernel.compiles_when_made or threads < 2:
        return 0
    problems: dict[Any, None] = {}
    for case in cases:
        with contextlib.suppress(torch.OutOfMemoryError, MemoryError):  # the case itself is then left out
            selection = subject.function.explain(**case.make(subject.device))
            if subject.claims_of(selection).holds:
                problems[selection.problem] = None
    if len(problems) < 2:
        return 0
    contract, timeout_s = subject.function.op.contract, HUB.settings["KERNELHUB_LOAD_TIMEOUT_S"]
    pool = ThreadPoolExecutor(threads, "kernelhub compile")
    try:
        making = [
            pool.submit(contextvars.copy_context().run, make_adapter, kernel, contract, problem, timeout_s, HUB.watch)
            for problem in problems
        ]
        wait(making, limit_s)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return len(problems)


def cores_here() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
