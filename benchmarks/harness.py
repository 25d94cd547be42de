"""Timing of nanosecond-sized statements on a machine that others use too.

Contention only ever adds time. So each statement is timed in many short samples, shorter than a scheduler's
slice, all statements shuffled within each round, and the tenth percentile is what a quiet machine shows.
Compare ratios measured in one run, never nanoseconds of two.
"""

from __future__ import annotations

import random
import timeit
from collections.abc import Mapping
from typing import Any

SAMPLE_S = 0.0004
ROUNDS = 300


def time_statements(statements: Mapping[str, str], names: dict[str, Any], rounds: int = ROUNDS) -> dict[str, float]:
    """Nanoseconds of one execution of each statement, p10 over `rounds` samples."""
    timers = {}
    for label, statement in statements.items():
        timer = timeit.Timer(statement, globals=names)
        timer.timeit(50)
        number = 8
        while (elapsed := timer.timeit(number)) < SAMPLE_S / 4:
            number *= 2
        timers[label] = (timer, max(3, int(number * SAMPLE_S / elapsed)))
    samples: dict[str, list[float]] = {label: [] for label in statements}
    order = list(timers)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for label in order:
            timer, number = timers[label]
            samples[label].append(timer.timeit(number) / number * 1e9)
    return {label: sorted(values)[len(values) // 10] for label, values in samples.items()}
