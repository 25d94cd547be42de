"""What FlashInfer's products ask of tensors: pointers are read, strides hardly ever."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.formats import from_e8m0

TILE_ROWS, TILE_GROUPS = 128, 4


def whole(tensor: Tensor) -> Tensor:
    """Row after row without gaps from an address of whole 16 bytes, told by strides that say so."""
    if not tensor.is_contiguous() or tensor.data_ptr() & 15:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= size
    wanted = tuple(reversed(strides))  # a dimension of one element may have any stride
    return tensor if tensor.stride() == wanted else tensor.as_strided(tensor.shape, wanted)


def lies_whole(tensor: Tensor) -> bool:
    """Whether a result may be written where it is."""
    return tensor.is_contiguous() and not tensor.data_ptr() & 15


def as_float32(scale: Tensor) -> Tensor:
    """Scales as numbers; those of e8m0 are powers of two, all of which float32 has."""
    if scale.dtype is torch.float32:
        return scale
    return from_e8m0(scale if scale.dtype is torch.uint8 else scale.view(torch.uint8))


def columns_of_rows(scale: Tensor, room: int) -> Tensor:
    """Scales [M, C] of rows as [C, room], zeros behind the first M of each."""
    rows, columns = scale.shape
    if room == rows:
        return whole(scale.t())
    made = scale.new_zeros((columns, room))
    made[:, :rows] = scale.t()
    return made


def with_rows(matrix: Tensor, rows: int) -> Tensor:
    """The matrix with rows of zeros below until there are that many."""
    missing = rows - matrix.shape[0]
    if not missing:
        return matrix
    raw = matrix.view(torch.uint8) if matrix.element_size() == 1 else matrix
    return torch.nn.functional.pad(raw, (0, 0, 0, missing)).view(matrix.dtype)


def tiled(scale: Tensor) -> Tensor:
    """Scales [R, C] as [R up to whole 128, C up to whole 4], in tiles of 128 rows by 4 groups; of one byte as uint8.

    Row m and group c of a tile lie at 16 (m mod 32) + 4 (m div 32) + c; what fills it up is zero.
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
    plain = tiles.view(high, wide, 32, 4, TILE_GROUPS).permute(0, 3, 2, 1, 4).reshape(tiles.shape)
    return plain[:rows, :groups].contiguous()


def shuffled(rows: Tensor) -> Tensor:
    """Of each 32 rows, the r-th at 8 (r mod 4) + r div 4: the order of TensorRT-LLM's tiles of 128 rows."""
    blocks: Tensor = rows.unflatten(0, (-1, 8, 4))
    return blocks.transpose(1, 2).reshape(rows.shape)


def unshuffled(rows: Tensor) -> Tensor:
    """The rows of which `shuffled` made these."""
    blocks: Tensor = rows.unflatten(0, (-1, 4, 8))
    return blocks.transpose(1, 2).reshape(rows.shape)
