"""Layouts of operands and scales that the libraries require."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.shared.operands import row_major
from kernelhub.backends.shared.scales import as_numbers


def scales_of_rows(scale: Tensor, rows: int) -> Tensor:
    """Scales [M, columns], float32 or e8m0, as float32 [rows, columns], column after column; those added are zero."""
    own, columns = scale.shape
    if own == rows and scale.dtype is torch.float32 and scale.stride() == (1, rows) and scale.data_ptr() % 16 == 0:
        return scale
    made = torch.empty_strided((rows, columns), (1, rows), dtype=torch.float32, device=scale.device)
    made[:own].copy_(as_numbers(scale))
    made[own:].zero_()
    return made


def scales_of_blocks(scale: Tensor) -> Tensor:
    """Scales [blocks of N, blocks of K], float32 or e8m0, as float32, row after row."""
    return row_major(as_numbers(scale).float())
