"""Times of calls relative to each other: medians of interleaved samples, by events on a GPU, with their noise.

Other load on the machine slows all calls alike, so their ratio is more reliable than their times.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

TimedCall = Callable[[], object]

_WARM_UP_CALLS = 2
_FEWEST, _MOST = 3, 50
# Shorter calls are timed several at once.
_SAMPLE_S = 0.002
# Written before each call on a GPU: larger than any L2 cache, and the write takes long enough (0.1 ms at 5 TB/s)
# that the host has queued the call before the GPU reaches it.
_FLUSHED_BYTES = 512 << 20
# The median distance of samples from their median, times this, is their standard deviation where they are normal.
_OF_MAD = 1.4826


@dataclass(frozen=True)
class Timing:
    """Time of one call.

    Attributes:
        median_s: median over the samples.
        samples: number of samples.
        noise_s: spread of the samples, as a standard deviation that is robust against outliers.
    """

    median_s: float
    samples: int
    noise_s: float = 0.0


def timing_of(samples: Sequence[float]) -> Timing:
    """The median of samples, in seconds, and their noise."""
    median = statistics.median(samples)
    return Timing(median, len(samples), _OF_MAD * statistics.median(abs(sample - median) for sample in samples))


def time_calls(calls: Sequence[TimedCall], device: torch.device, budget_s: float) -> list[Timing]:
    """Time each call after a warm-up, all of them for about `budget_s` together."""
    sample = _by_clock
    if device.type == "cuda":
        sample = functools.partial(_by_events, torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device))
    for call in calls:
        sample(call, _WARM_UP_CALLS)
    once_s = [sample(call, 1) for call in calls]
    repeats = [max(1, min(_MOST, int(_SAMPLE_S / seconds))) for seconds in once_s]
    round_s = sum(seconds * number for seconds, number in zip(once_s, repeats, strict=True))
    rounds = max(_FEWEST, min(_MOST, int(budget_s / round_s)))
    samples = [[sample(call, number) for call, number in zip(calls, repeats, strict=True)] for _ in range(rounds)]
    return [timing_of(column) for column in zip(*samples, strict=True)]


def time_once(call: TimedCall, device: torch.device) -> Timing:
    """Time of one call after one to warm up."""
    sample = (
        _by_clock
        if device.type != "cuda"
        else functools.partial(_by_events, torch.empty(1, device=device, dtype=torch.float32))
    )
    sample(call, 1)
    return Timing(sample(call, 1), 1)


def _by_clock(call: TimedCall, repeats: int) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _by_events(flushed: torch.Tensor, call: TimedCall, repeats: int) -> float:
    """Seconds of one call on the current GPU, with cold caches."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for start, end in events:
        flushed.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sum(float(start.elapsed_time(end)) for start, end in events) / 1e3 / repeats
