"""Scales of small formats as the tensor cores of sm_100 and later fetch them, and as numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.formats import E8M0

TILE_ROWS, TILE_GROUPS = 128, 4


def as_numbers(scale: Tensor) -> Tensor:
    """Scales of float32 or e8m0; e8m0 may come as bytes."""
    return scale.view(E8M0) if scale.dtype is torch.uint8 else scale


def as_bytes(scale: Tensor) -> Tensor:
    """Scales of float32, or of e8m0 as bytes."""
    return scale.view(torch.uint8) if scale.dtype is E8M0 else scale


def tiled(scale: Tensor) -> Tensor:
    """Scales [R, C] as [R up to whole 128, C up to whole 4], in tiles of 128 rows by 4 groups; of one byte as uint8.

    Row m and group c of a tile are at 16 (m mod 32) + 4 (m div 32) + c; padding is zero.
    """
    raw = scale.view(torch.uint8) if scale.element_size() == 1 else scale
    rows, groups = raw.shape
    high, wide = -(-rows // TILE_ROWS), -(-groups // TILE_GROUPS)
    if (rows, groups) != (high * TILE_ROWS, wide * TILE_GROUPS):
        padded = raw.new_zeros(high * TILE_ROWS, wide * TILE_GROUPS)
        padded[:rows, :groups] = raw
        raw = padded
    tiles = raw.reshape(high, 4, 32, wide, TILE_GROUPS).permute(0, 3, 2, 1, 4)
    return tiles.contiguous().view(high * TILE_ROWS, wide * TILE_GROUPS)


def untiled(tiles: Tensor, rows: int, groups: int) -> Tensor:
    """Scales [rows, groups], of which `tiled` made these."""
    high, wide = tiles.shape[0] // TILE_ROWS, tiles.shape[1] // TILE_GROUPS
    straight = tiles.view(high, wide, 32, 4, TILE_GROUPS).permute(0, 3, 2, 1, 4).reshape(tiles.shape)
    return straight[:rows, :groups].contiguous()
