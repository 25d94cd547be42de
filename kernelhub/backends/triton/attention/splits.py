"""The number of parts that occupies every multiprocessor."""

from __future__ import annotations

import functools
from typing import NamedTuple


@functools.lru_cache(maxsize=4096)
def full_waves(programs: int, room: int, most: int) -> int:
    """Parts of each of `programs`, up to `most`, with which rounds of `room` programs are nearly full.

    As many as one round holds; if that fills less than 85 % of what the best number would, the fewest that fill
    as much.
    """
    filled = [programs * parts / (-(-programs * parts // room) * room) for parts in range(1, most + 1)]
    fewest = 1 + next(index for index, share in enumerate(filled) if share >= 0.85 * max(filled))
    return max(fewest, min(most, room // programs))


class Residents(NamedTuple):
    """What of a kernel fits a multiprocessor.

    Attributes:
        programs: how many run at once.
        loads_kib: shared memory that each of them keeps filling.
    """

    programs: int
    loads_kib: int


# Of the split-KV kernel with 16-bit operands on sm_90, by the width of a head: registers and shared memory as Triton
# 3.6 and 3.7 compile it. More than `_ENOUGH_KIB` in flight do not raise the bandwidth of a multiprocessor; one program
# alone reaches about half. Merging costs a launch, `_MERGE_BYTES`, the traffic of the parts, and 5 % of the whole.
# Fitted to times on an H200: benchmarks/results/splits_h200.json, by scripts/measure_splits.py.
HOPPER = {64: Residents(4, 39), 128: Residents(3, 74), 256: Residents(3, 41)}
_ENOUGH_KIB = 125
_MERGE_BYTES = 150_000
_MERGE_FACTOR = 1.05
_NEAR = 1.02
_MOST_ROUNDS = 4  # more parts than fill so many rounds gain nothing
MEASURED_ROWS = 16  # of a tile


@functools.lru_cache(maxsize=4096)
def cheapest(programs: int, num_sms: int, residents: Residents, keys: int, row_bytes: int, most: int) -> int:
    """The fewest parts of each of `programs`, up to `most`, that take the least time, or 2 % more.

    Fewest, because `keys` is a bound, and shorter sequences gain less by parts than they pay for merging.

    Programs run in rounds. A full round fills each multiprocessor; the last may leave some with fewer programs, which
    then draw less bandwidth. Time is counted in bytes that a multiprocessor could have read.

    Args:
        programs: programs with one part each.
        num_sms: multiprocessors of the device.
        residents: what of the kernel fits each.
        keys: keys of a program.
        row_bytes: bytes of a key and its value.
        most: most parts.
    """

    def time_of(parts: int) -> float:
        count, each = programs * parts, keys * row_bytes / parts
        rounds, rest = divmod(count, residents.programs * num_sms)
        spent = rounds * _busy(residents.programs, residents) * each
        if rest:
            spent += _busy(-(-rest // num_sms), residents) * each
        if parts > 1:
            spent = spent * _MERGE_FACTOR + _MERGE_BYTES + count * MEASURED_ROWS * 2 * row_bytes / num_sms
        return spent

    rounds_of_parts = _MOST_ROUNDS * residents.programs * num_sms // programs
    times = [time_of(parts) for parts in range(1, max(1, min(most, rounds_of_parts)) + 1)]
    enough = _NEAR * min(times)
    return 1 + next(index for index, spent in enumerate(times) if spent <= enough)


def _busy(programs: int, residents: Residents) -> float:
    """How much longer `programs` on one multiprocessor take than their bytes at full bandwidth, times their number."""
    share = 0.5 if programs == 1 else min(1.0, programs * residents.loads_kib / _ENOUGH_KIB)
    return programs / share
