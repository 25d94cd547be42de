"""The layout of Marlin's codes and scales, with which a thread loads its tensor-core operands in 16 bytes.

Codes are in tiles of 64 rows of b (columns of the product) by 16 of K. A warp's thread holds, of each of the four 16
rows of a tile, eight codes: rows c and c + 8, of each columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, where the thread is
4 c + t. They are four bytes: bits are taken so that two codes, 16 bits apart, become two numbers of 16 bits at once.

Scales are in consecutive fours of K's groups, 64 rows of b together, the eight of a thread beside each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 64  # rows of b


def padded_rows(n: int, k: int) -> int:
    """Rows of b in whole tiles: of 64 where K has whole tiles of 128, else of 128."""
    tile = 64 if k % 128 == 0 else 128
    return -(-n // tile) * tile


def ordered_codes(codes: Tensor) -> Tensor:
    """Bytes [N, K / 2], N a multiple of 64 and K of 16, as int32 [K / 16, 2 N]."""
    n, half = codes.shape
    # tile of rows, 16 rows, row or row + 8, c, tile of columns, column or column + 8, t
    sides = codes.view(n // TILE, 4, 2, 8, half // 8, 2, 4)
    pairs = _exchanged(sides[:, :, :, :, :, 0], sides[:, :, :, :, :, 1])
    # now: tile of rows, 16 rows, row or row + 8, c, tile of columns, t, even or odd column
    made = torch.stack(pairs, -1).permute(4, 0, 3, 5, 1, 6, 2)
    return made.reshape(half // 8, n * 8).view(torch.int32)


def plain_codes(ordered: Tensor) -> Tensor:
    """The inverse of `ordered_codes`."""
    tiles, n = ordered.shape[0], ordered.shape[1] // 2
    made = ordered.view(torch.uint8).view(tiles, n // TILE, 8, 4, 4, 2, 2).permute(1, 4, 6, 2, 0, 3, 5)
    sides = torch.stack(_exchanged(made[..., 0], made[..., 1]), -2)
    return sides.reshape(n, tiles * 8)


def ordered_bytes(codes: Tensor) -> Tensor:
    """Bytes [N, K] of one code each, N a multiple of 64 and K of 16, as [K / 16, 16 N].

    The thread 4 c + t has, of each of the four 16 rows of a tile, rows c and c + 8, of each columns 2 t, 2 t + 8,
    2 t + 1 and 2 t + 9.
    """
    n, k = codes.shape
    # tile of rows, 16 rows, row or row + 8, c, tile of columns, column or column + 8, t, even or odd column
    parts = codes.view(n // TILE, 4, 2, 8, k // 16, 2, 4, 2)
    return parts.permute(4, 0, 3, 6, 1, 2, 7, 5).reshape(k // 16, 16 * n)


def plain_bytes(ordered: Tensor) -> Tensor:
    """The inverse of `ordered_bytes`."""
    tiles, n = ordered.shape[0], ordered.shape[1] // 16
    parts = ordered.view(tiles, n // TILE, 8, 4, 4, 2, 2, 2).permute(1, 4, 5, 2, 0, 7, 3, 6)
    return parts.reshape(n, 16 * tiles)


def ordered_columns(scale: Tensor) -> Tensor:
    """One scale of 16 bits for each row of b, [N], as [1, N]: of 32 rows those of a thread's columns of the result."""
    return scale.reshape(-1, 4, 4, 2).transpose(1, 2).reshape(1, -1)


def plain_columns(ordered: Tensor) -> Tensor:
    """The inverse of `ordered_columns`."""
    return ordered.reshape(-1, 4, 4, 2).transpose(1, 2).reshape(-1)


def ordered_scales(scale: Tensor) -> Tensor:
    """Bytes [N, groups], N a multiple of 64, as [groups, N]; of 16 bits too, whose middle ones do not change places."""
    n, groups = scale.shape
    if scale.itemsize == 2:
        return scale.t().reshape(groups, n // TILE, 8, 8).transpose(2, 3).reshape(groups, n)
    made = scale.t().reshape(groups, n // TILE, 2, 2, 2, 8).permute(0, 1, 5, 2, 4, 3)
    return made.reshape(groups, n)


def plain_scales(ordered: Tensor) -> Tensor:
    """The inverse of `ordered_scales`."""
    groups, n = ordered.shape
    if ordered.itemsize == 2:
        return ordered.view(groups, n // TILE, 8, 8).transpose(2, 3).reshape(groups, n).t().contiguous()
    made = ordered.view(groups, n // TILE, 8, 2, 2, 2).permute(0, 1, 3, 5, 4, 2)
    return made.reshape(groups, n).t().contiguous()


def _exchanged(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two bytes with two codes each, as the low codes of both and the high codes of both; its own inverse."""
    return (first & 15) | (second << 4), (first >> 4) | (second & 0xF0)
