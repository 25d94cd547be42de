"""How operands and scales have to lie for the libraries."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.formats import E8M0
from kernelhub.runtime.operators import plain

_TILE_ROWS, _TILE_COLUMNS = 128, 4  # of scales of float4, which lie in tiles


def scales_of_rows(scale: Tensor, rows: int) -> Tensor:
    """Scales [M, columns], float32 or e8m0, as float32 [rows, columns], column after column; those added are zero."""
    own, columns = scale.shape
    if own == rows and scale.dtype is torch.float32 and scale.stride() == (1, rows) and scale.data_ptr() % 16 == 0:
        return scale
    made = torch.empty_strided((rows, columns), (1, rows), dtype=torch.float32, device=scale.device)
    made[:own].copy_(_values(scale))
    made[own:].zero_()
    return made


def scales_of_blocks(scale: Tensor) -> Tensor:
    """Scales [blocks of N, blocks of K], float32 or e8m0, as float32, row after row."""
    return plain(_values(scale).float())


def swizzled(scale: Tensor) -> Tensor:
    """Scales [rows, columns] of float4, one byte each, in the order in which Blackwell's tensor cores fetch them.

    They lie in tiles of 128 rows by 4 columns, tile after tile along a row of tiles; in a tile, the four columns of
    row 32 j + i are bytes 16 i + 4 j to 16 i + 4 j + 3. Tiles are filled up with zeros.
    """
    rows, columns = scale.shape
    high, wide = -(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS)
    raw = scale.view(torch.uint8)
    if (rows, columns) != (high * _TILE_ROWS, wide * _TILE_COLUMNS):
        padded = raw.new_zeros(high * _TILE_ROWS, wide * _TILE_COLUMNS)
        padded[:rows, :columns] = raw
        raw = padded
    tiles = raw.reshape(high, 4, 32, wide, _TILE_COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(high * _TILE_ROWS, wide * _TILE_COLUMNS).contiguous().view(scale.dtype)


def unswizzled(made: Tensor, rows: int, columns: int) -> Tensor:
    """What `swizzled` was given."""
    high, wide = made.shape[0] // _TILE_ROWS, made.shape[1] // _TILE_COLUMNS
    tiles = made.view(torch.uint8).reshape(high, wide, 32, 4, _TILE_COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(made.shape)[:rows, :columns].contiguous().view(made.dtype)


def _values(scale: Tensor) -> Tensor:
    return scale.view(E8M0) if scale.dtype is torch.uint8 else scale
