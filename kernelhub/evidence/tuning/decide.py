"""The ranking of kernels from their order and measured times: pure functions of plain values.

The order's first kernel keeps its place unless another is faster by more than the noise and by more than a margin. So
two runs on one machine give the same result, and a selection changes only for a noticeable gain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Least gain that changes a selection. The same kernel timed twice on one GPU differs by 1 to 2 %, since clocks and
# memory temperature drift that much in a minute (docs/measured.md). 3 % is above that, and below an engine's noise.
MARGIN = 0.03

FIRST, FASTER, TIE, ALONE = "first", "faster", "tie", "alone"
WORDS = {
    FIRST: "the order's first kernel is the fastest",
    FASTER: "faster than the order's first kernel",
    TIE: "as fast as the fastest, within noise and margin; the order's first kernel stays",
    ALONE: "the only one that was measured at every size",
}


class Time(NamedTuple):
    """Time of a call in microseconds, and the standard deviation of a sample."""

    us: float
    noise_us: float = 0.0


class RankedKernels(NamedTuple):
    """Kernels, best first, and why the first one is: a key of `WORDS`."""

    ranking: tuple[str, ...]
    word: str


class Regret(NamedTuple):
    """Extra time of a kernel over the fastest: microseconds of a call, and percent of the fastest's time."""

    us: float
    percent: float


def beats(one: Time, other: Time, margin: float = MARGIN) -> bool:
    """Whether `one` is faster by more than the noise of both and by more than the margin."""
    gain = other.us - one.us
    return gain > margin * other.us and gain > math.hypot(one.noise_us, other.noise_us)


def decide(order: Sequence[str], times: Mapping[str, Time], margin: float = MARGIN) -> RankedKernels:
    """The ranking for one size.

    Args:
        order: kernels as ranked without measurements.
        times: times of the measured kernels, at least one.
        margin: as of `beats`.

    Returns:
        The selected kernel, then the others from the fastest. The order decides between equal times.
    """
    place = {name: index for index, name in enumerate(order)}
    named = sorted(times, key=lambda name: (place.get(name, len(place)), name))
    by_time = sorted(named, key=lambda name: times[name].us)
    incumbent, fastest = named[0], by_time[0]
    if len(named) == 1:
        return RankedKernels((incumbent,), ALONE)
    unbeaten = [name for name in named if not any(beats(time, times[name], margin) for time in times.values())]
    if incumbent in unbeaten:
        chosen, word = incumbent, FIRST if fastest == incumbent else TIE
    else:  # a kernel that beats one that beats the incumbent beats the incumbent too, so one exists
        chosen, word = next(name for name in unbeaten if beats(times[name], times[incumbent], margin)), FASTER
    return RankedKernels((chosen, *(name for name in by_time if name != chosen)), word)


def decide_for_all(order: Sequence[str], sizes: Sequence[Mapping[str, Time]], margin: float = MARGIN) -> RankedKernels:
    """The ranking for a problem class of several sizes: the kernel with the least total regret is first.

    Regret is relative to the fastest kernel's time at each size, and all sizes have equal weight: in microseconds the
    largest size alone would decide. A kernel without a measurement at a size of other kernels cannot be selected for
    all sizes; it ranks last.

    Args:
        order: as of `decide`.
        sizes: times at each size; at least one of them contains a kernel.
        margin: as of `beats`.
    """
    sizes = [times for times in sizes if times]
    counts = {name: sum(name in times for times in sizes) for times in sizes for name in times}
    most = max(counts.values())
    scores = {name: slowdown(name, sizes) for name, count in counts.items() if count == most}
    choice = decide(order, scores, margin)
    rest = sorted((name for name in counts if name not in scores), key=lambda name: (-counts[name], name))
    return RankedKernels((*choice.ranking, *rest), choice.word)


def slowdown(kernel: str, sizes: Sequence[Mapping[str, Time]]) -> Time:
    """Time of a kernel relative to the fastest, on average over its measured sizes."""
    measured = [(times[kernel], min(time.us for time in times.values())) for times in sizes if kernel in times]
    ratios = [time.us / best for time, best in measured]
    noise = math.sqrt(sum((time.noise_us / best) ** 2 for time, best in measured)) / len(measured)
    return Time(sum(ratios) / len(ratios), noise)


def regret(chosen: str, times: Mapping[str, Time]) -> Regret | None:
    """Extra time of a kernel over the fastest; None if it was not measured."""
    if chosen not in times:
        return None
    best = min(time.us for time in times.values())
    extra = times[chosen].us - best
    return Regret(extra, 100.0 * extra / best if best > 0 else 0.0)
