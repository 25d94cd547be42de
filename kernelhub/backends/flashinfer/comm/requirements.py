"""What the norm of the library's kernels requires of a row, of which a thread has 16 bytes.

Up to eight blocks of threads share a row, as a cluster.
"""

from __future__ import annotations

_UNIT = 16  # bytes of a thread
_WARP = 32


def threads_of_a_block(threads_of_a_row: int) -> int:
    """Threads of the smallest block that the library divides a row into; larger ones are multiples of it."""
    blocks = 8
    while threads_of_a_row % blocks:
        blocks //= 2
    threads = threads_of_a_row // blocks
    while threads < 128 and blocks > 1:
        threads, blocks = 2 * threads, blocks // 2
    return threads


def whole_warps(hidden_size: int) -> str | None:
    """Why a norm of rows of 2-byte elements would be wrong: 0.6.12, unlike 0.6.18, sums a part of a warp as a whole."""
    threads = threads_of_a_block(max(1, hidden_size * 2 // _UNIT))
    if threads % _WARP:
        return f"rows of {hidden_size} would be summed by blocks of {threads} threads, which are no whole warps"
    return None
