"""Times of calls in CUDA graphs, and the least time in which this GPU moves as many bytes: the practical roof.

A roof from gigabytes cannot be reached by a few MB, which take less time than a launch takes to reach all
multiprocessors and memory takes to answer. So the roof of a call is that of the fastest copy of as many bytes read and
written, timed as the call is: in a graph of calls one after another, each with operands of its own, so that caches are
cold where all of them together exceed the L2 cache.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.cuda import library, nvrtc
from kernelhub.probes.device import facts

COLD_BYTES = 160 << 20  # of all operands of a graph's calls together: three times the L2 cache of an H200
MOST_COPIES = 64
_FEWEST_CALLS = 24
_REPLAYS = 7
_VECTOR = 16
_SOURCE = Path(__file__).with_name("copy.cu")
# (vectors of a thread, threads of a block)
_SHAPES = ((1, 256), (1, 512), (2, 256), (4, 256), (4, 512), (8, 256))


def copies_for(moved: int) -> int:
    """Sets of operands so that calls which move so many bytes find nothing of them in the L2 cache."""
    return max(2, min(MOST_COPIES, -(-COLD_BYTES // max(1, moved))))


def copied(value: Any) -> Any:
    """The same in memory of its own, with the same strides."""
    if isinstance(value, Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        made.copy_(value)
        return made
    if isinstance(value, dict):
        return {name: copied(one) for name, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(copied(one) for one in value)
    if isinstance(value, (list, tuple)):
        return type(value)(copied(one) for one in value)
    return value


def graph_us(calls: Sequence[Callable[[], object]], least: int = _FEWEST_CALLS, replays: int = _REPLAYS) -> float:
    """Microseconds of one call in a graph of all of them, repeated in turn; the median of the replays.

    What calls return is kept until the graph ends, so that each result has memory of its own.
    """
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    rounds, kept = -(-least // len(calls)), []
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):  # `torch.cuda.graph` collects garbage first, which takes longer than all else
        graph.capture_begin()
        try:
            for number in range(rounds):
                made = [call() for call in calls]
                if number == 0:
                    kept = made
        finally:
            graph.capture_end()
    del kept, made
    count = rounds * len(calls)
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / count)
    return statistics.median(times)


@dataclasses.dataclass(frozen=True)
class Roof:
    """The fastest copies of as many bytes.

    Attributes:
        us: of the fastest of all.
        by: which it was.
        all_us: of each.
    """

    us: float
    by: str
    all_us: dict[str, float]


def practical_roof(reads: int, writes: int, device: torch.device, cold: bool = True) -> Roof:
    """The least time of a copy of so many bytes read and written.

    Torch's `copy_` is a node of the graph that copies memory, and `mul` a kernel of torch; both read and write half of
    the bytes. The others are kernelhub's simplest kernel, with so many vectors of 16 bytes a thread and so many threads
    a block, "streamed" past the caches or not; they read and write as many bytes each as the call, and need NVRTC.
    Those that are "ahead" overlap, as kernelhub's CUDA kernels do.

    Args:
        reads: bytes that are read.
        writes: bytes that are written.
        device: a GPU.
        cold: copies of different memory in turn, so that the L2 cache has little of it.
    """
    from_bytes, to_bytes = (max(_VECTOR, -(-bytes // _VECTOR) * _VECTOR) for bytes in (reads, writes))
    least = _FEWEST_CALLS if reads + writes < COLD_BYTES // 2 else 4
    half = -(-(reads + writes) // 2 // _VECTOR) * _VECTOR
    count = copies_for(reads + writes) if cold else 1
    room = max(from_bytes, half), max(to_bytes, half)
    pairs = [tuple(torch.zeros(size // 4, dtype=torch.int32, device=device) for size in room) for _ in range(count)]
    evens = [(to[: half // 4], given[: half // 4]) for given, to in pairs]
    ways: dict[str, list[Callable[[], object]]] = {
        "copy_": [lambda to=to, given=given: to.copy_(given) for to, given in evens],
        "mul": [lambda to=to, given=given: torch.mul(given, 1, out=to) for to, given in evens],
    }
    vectors = from_bytes // _VECTOR, to_bytes // _VECTOR
    own = itertools.product((0, 1), (0, 1), _SHAPES) if _compiles() else ()
    for ahead, streamed, (each, threads) in own:
        if not ahead or library.overlap(facts(device).capability):
            constants = {"EACH": each, "STREAMED": streamed, "OVERLAPS": ahead}
            kernel = library.library(str(_SOURCE), constants, facts(device)).kernel("copy", "2P" + "2q")
            launch = functools.partial(kernel, device.index, -(-max(vectors) // (each * threads)), threads)
            name = f"{each} x {threads}{' streamed' if streamed else ''}{' ahead' if ahead else ''}"
            ways[name] = [functools.partial(launch, given, to, *vectors) for given, to in pairs]
    all_us = {name: graph_us(calls, least, 5) for name, calls in ways.items()}
    by = min(all_us, key=lambda name: all_us[name])
    return Roof(all_us[by], by, all_us)


def _compiles() -> bool:
    """Whether NVRTC is here."""
    try:
        nvrtc.compiler()
    except nvrtc.CompileError:
        return False
    return True
