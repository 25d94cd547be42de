"""How a message of any shape is given to the library's kernels: as rows, of which a thread has 16 bytes."""

from __future__ import annotations

import functools

UNIT = 16  # bytes of a thread
_LEAST_THREADS, _MOST_THREADS = 64, 512  # of a row that we choose


@functools.lru_cache(maxsize=1024)
def rows_of(num_bytes: int, least_rows: int) -> tuple[int, int]:
    """Rows of a message of any shape, and the units of a row; together they may be more than the message.

    Args:
        num_bytes: of the message; at least one.
        least_rows: how many rows there must be.
    """
    units, odd = divmod(num_bytes, UNIT)
    if not odd:
        for threads in range(min(_MOST_THREADS, units // least_rows), _LEAST_THREADS - 1, -1):
            if not units % threads:
                return units // threads, threads
    return max(least_rows, -(-num_bytes // (UNIT * _LEAST_THREADS))), _LEAST_THREADS
