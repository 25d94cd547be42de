"""Tiles of the kernels over memory of all ranks, by the largest message of a bucket.

Measured on 2 H100 with NVLink, bfloat16, in CUDA graphs (benchmarks/results/nvlink_h100.json). In one shot, small tiles
win: at 8 KB 1, 2, 4 and 8 KB take 2.70, 2.83, 3.16 and 3.58 us; at 1 MB 4, 8 and 16 KB take 6.1, 6.5 and 6.9 us. Two
tiles ahead suffice: with eight, 32 MB take 106 us in place of 97. Rows of 7168 with a norm take no longer with 8 warps
than with 16: 64 rows 6.7 and 6.9 us, 256 rows 14.8 and 16.3.
"""

from __future__ import annotations

from typing import NamedTuple

import triton


class Tile(NamedTuple):
    """How a kernel is launched.

    Attributes:
        bytes: of x that a program handles at a time.
        warps: of a program; 16 bytes per thread and load.
        ahead: tiles that a program sends before it waits for the first.
        programs: most of a grid.
    """

    bytes: int
    warps: int
    ahead: int
    programs: int


def one_shot_tile(message_bytes: int) -> Tile:
    """For messages up to a size."""
    return Tile(2048, 4, 1, 132) if message_bytes <= 256 << 10 else Tile(4096, 8, 2, 512)


def two_shot_tile(message_bytes: int) -> Tile:
    """For messages up to a size."""
    return Tile(4096, 8, 8, 512)


def row_tile(hidden_size: int, item_bytes: int) -> Tile:
    """For rows of a size, each of which a program holds."""
    size = triton.next_power_of_2(hidden_size) * item_bytes
    return Tile(size, min(8, max(1, size // 1024)), 2, 512)


def quantised_row_tile(hidden_size: int, item_bytes: int) -> Tile:
    """The same for rows that are quantised: whole groups of elements, and registers for their scales."""
    block = max(1024, triton.next_power_of_2(hidden_size))
    return Tile(block * item_bytes, max(4, block // 512), 2, 512)
