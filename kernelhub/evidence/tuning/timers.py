"""Timing of one kernel on operands outside of caches: by a replayed CUDA graph, by events, or by the clock.

On a GPU a capture-safe kernel is timed as engines run it: consecutive calls in one CUDA graph, without host work. Other
kernels are timed by events around consecutive calls, including host work. On a CPU the clock is read. Calls cycle
through several copies of their operands, so that weights come from memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kernelhub.errors import KernelhubError
from kernelhub.evidence.timing import TimedCall, Timing, timing_of

GRAPH, EVENTS, CLOCK = "graph", "events", "clock"

FEWEST_SAMPLES = 5  # for a meaningful median and noise
# Least time of one sample, so that the clock's resolution (1 us of events, 0.1 us of perf_counter) is below 0.1 %.
_SAMPLE_S = 0.002
_MOST_IN_A_SAMPLE = 512
# A call that takes this many times as long as the fastest so far gets no more than its first samples.
MUCH_SLOWER = 5.0


class Timer:
    """Calls of one kernel, ready for timing.

    Attributes:
        how: ``"graph"``, ``"events"`` or ``"clock"``.
        samples: seconds of one call, per sample.
    """

    def __init__(
        self, calls: Sequence[TimedCall], device: torch.device, *, capture: bool, before: TimedCall | None = None
    ) -> None:
        """Warm up, and capture if requested and possible.

        Args:
            calls: the same call on each copy of its operands.
            device: device of the calls.
            capture: whether the kernel's record declares it capture-safe.
            before: called before each sample to set the kernel's sizes.
        """
        self.samples: list[float] = []
        self._before = before or _nothing
        self._calls = calls
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self.how = CLOCK if device.type != "cuda" else EVENTS
        self._before()
        for call in calls:
            call()
        once_s = self._of_calls(len(calls))
        rounds = max(1, min(_MOST_IN_A_SAMPLE, int(_SAMPLE_S / max(once_s, 1e-9))) // len(calls))
        self._number = rounds * len(calls)
        if capture and device.type == "cuda":
            self._capture()
        self.sample()  # the first replay loads the graph
        self.samples.clear()

    def sample(self) -> float:
        """Measure the seconds of one call, and add them to the samples."""
        if self._graph is None:
            self._before()
            seconds = self._of_calls(self._number)
        else:
            seconds = self._of_graph(self._graph)
        self.samples.append(seconds)
        return seconds

    @property
    def timing(self) -> Timing:
        """The median of the samples, and their noise."""
        return timing_of(self.samples)

    def _capture(self) -> None:
        """One graph of all calls of a sample; None if the capture fails."""
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=pool):
                self._in_turn(self._number)
        except KernelhubError:
            raise
        except RuntimeError:  # the kernel syncs or allocates; the capture has ended, nothing ran
            torch.cuda.synchronize(self._device)
            _end_failed_capture(self._device, pool)
            return
        self._graph, self.how = graph, GRAPH

    def _of_calls(self, number: int) -> float:
        if self._device.type != "cuda":
            start_s = time.perf_counter()
            self._in_turn(number)
            return (time.perf_counter() - start_s) / number
        with torch.cuda.device(self._device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._in_turn(number)
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / number

    def _of_graph(self, graph: torch.cuda.CUDAGraph) -> float:
        with torch.cuda.device(self._device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / self._number

    def _in_turn(self, number: int) -> None:
        calls = self._calls
        for place in range(number):
            calls[place % len(calls)]()


def _end_failed_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Reset torch's state after a capture that CUDA ended with an error.

    torch 2.11 leaves such a capture half open: its random numbers raise from then on, and memory that another stream
    has used is never released. Ending the capture's pool fixes the second, the next successful capture the first.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(index, pool)
    except RuntimeError:
        return  # the pool is not recording: the capture ended normally
    torch._C._cuda_releasePool(index, pool)
    with torch.cuda.device(device):
        some = torch.zeros(1, device=device, dtype=torch.float32)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            some.zero_()


def _nothing() -> None:
    return None


def race(timers: Sequence[Timer], samples: int, limit_s: float) -> list[Timing]:
    """Take interleaved samples of all timers, so that other load on the machine affects all alike.

    Args:
        timers: at least one.
        samples: most samples per timer.
        limit_s: seconds after which no more than `FEWEST_SAMPLES` are taken.
    """
    begun = time.monotonic()
    for number in range(max(samples, FEWEST_SAMPLES)):
        if number >= FEWEST_SAMPLES and time.monotonic() - begun > limit_s:
            break
        best_s = min((min(timer.samples) for timer in timers if timer.samples), default=float("inf"))
        for timer in timers:
            if number < FEWEST_SAMPLES or min(timer.samples) < MUCH_SLOWER * best_s:
                timer.sample()
    return [timer.timing for timer in timers]
