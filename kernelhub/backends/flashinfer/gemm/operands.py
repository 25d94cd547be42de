"""What FlashInfer's products require of tensors: they read pointers, and strides hardly ever."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.shared.operands import row_major
from kernelhub.ops.formats import from_e8m0


def as_float32(scale: Tensor) -> Tensor:
    """Scales as numbers; those of e8m0 are powers of two, all of which float32 has."""
    if scale.dtype is torch.float32:
        return scale
    return from_e8m0(scale if scale.dtype is torch.uint8 else scale.view(torch.uint8))


def columns_of_rows(scale: Tensor, room: int) -> Tensor:
    """Scales [M, C] of rows as [C, room], zeros behind the first M of each."""
    rows, columns = scale.shape
    if room == rows:
        return row_major(scale.t())
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


def shuffled(rows: Tensor) -> Tensor:
    """Of each 32 rows, the r-th at 8 (r mod 4) + r div 4: the order of TensorRT-LLM's tiles of 128 rows."""
    blocks: Tensor = rows.unflatten(0, (-1, 8, 4))
    return blocks.transpose(1, 2).reshape(rows.shape)


def unshuffled(rows: Tensor) -> Tensor:
    """The rows of which `shuffled` made these."""
    blocks: Tensor = rows.unflatten(0, (-1, 4, 8))
    return blocks.transpose(1, 2).reshape(rows.shape)
