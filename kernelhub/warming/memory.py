"""How many compile jobs this machine has room for, and what was used at most."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from kernelhub.warming.outcome import Peak

JOB_BYTES = 4 << 30  # what nvcc and ninja take at most for one of FlashInfer's larger modules
MAX_JOBS = "MAX_JOBS"  # of torch's and FlashInfer's ninja
RANKS = "LOCAL_WORLD_SIZE"  # as torchrun sets it

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def jobs_here(ranks: int | None = None) -> int:
    """``min(cores, free memory / 4 GB) / ranks of this node``, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = free_bytes()
    room = cores if free is None else min(cores, free // JOB_BYTES)
    return max(1, room // max(1, ranks_here() if ranks is None else ranks))


def ranks_here() -> int:
    """Processes of one job on this node, as LOCAL_WORLD_SIZE says; 1 without it."""
    said = os.environ.get(RANKS, "")
    return max(1, int(said)) if said.isdigit() else 1


def free_bytes() -> int | None:
    """Memory that can still be had: what the system has, and what the control group leaves; None if neither says."""
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
    """Free memory of a GPU; 0 of a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


@contextlib.contextmanager
def max_jobs(jobs: int) -> Iterator[None]:
    """MAX_JOBS for what is compiled in the block, unless it is set."""
    if MAX_JOBS in os.environ:
        yield
        return
    os.environ[MAX_JOBS] = str(jobs)
    try:
        yield
    finally:
        os.environ.pop(MAX_JOBS, None)


def peak(device: torch.device) -> Peak:
    """The most memory so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
    return Peak(host, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0, children)
