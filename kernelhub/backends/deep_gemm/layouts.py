"""Rows and scales as the library reads them.

Its kernels fetch by TMA, so that every matrix starts at 16 bytes. Scales of rows are column-major, columns a multiple
of 16 bytes apart: float32 on Hopper, and on Blackwell exponents, four along K in an int32. Handed over in any other
form they are transposed by kernels of the library; here they are made so in one copy, from any strides and from UE8M0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.shared.operands import row_major, up_to
from kernelhub.backends.shared.scales import as_numbers

BLOCK = 128
_WORDS = 4  # scales of 4 bytes, float32 or four exponents, that make 16 bytes


def scales_of_rows(scale: Tensor, exponents: bool) -> Tensor:
    """Scales ``[..., rows, columns]`` of rows, float32 or UE8M0: the same column-major, or as exponents in int32."""
    if exponents:
        return _packed(scale.view(torch.uint8))
    rows, columns = scale.shape[-2:]
    apart = up_to(rows, _WORDS)
    strides = (1, apart) if scale.ndim == 2 else (apart * columns, 1, apart)
    if scale.dtype is torch.float32 and scale.stride() == strides and scale.data_ptr() % 16 == 0:
        return scale
    made = torch.empty_strided(scale.shape, strides, dtype=torch.float32, device=scale.device)
    return made.copy_(as_numbers(scale))


def scales_of_blocks(scale: Tensor, n: int, exponents: bool) -> Tensor:
    """Scales ``[..., ceil(n / 128), columns]`` of blocks: row-major, or one of exponents for each of `n` rows."""
    if exponents:
        each = scale.view(torch.uint8).unsqueeze(-2).expand(*scale.shape[:-1], BLOCK, scale.shape[-1])
        return _packed(each.flatten(-3, -2)[..., :n, :])
    return row_major(as_numbers(scale).float())


def _packed(exponents: Tensor) -> Tensor:
    """Bytes ``[..., rows, columns]`` as int32 ``[..., rows, ceil(columns / 4)]``, column-major, the first lowest."""
    *lead, rows, columns = exponents.shape
    words, apart = -(-columns // 4), up_to(rows, _WORDS)
    made = torch.zeros(*lead, words, apart, 4, dtype=torch.uint8, device=exponents.device)
    for word in range(4):  # a copy for each place, since the last word may be cut short
        part = exponents[..., word::4]
        made[..., : part.shape[-1], :rows, word] = part.transpose(-1, -2)
    packed = made.view(torch.int32).squeeze(-1).transpose(-1, -2)
    return packed[..., :rows, :]
