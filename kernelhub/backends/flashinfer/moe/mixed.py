"""The layout of weights and scales for CUTLASS's products of float4 by bfloat16 on sm_90, and its inverse.

Of 16 rows by 32 bytes, four bytes that an MMA needs at once are adjacent: those of two rows 8 apart and two columns 4
apart. Of these eight codes, signs and the bits behind them change places, so that a few masks and shifts make bfloat16
pairs. Scales are in blocks of 64 rows by 4 groups, each block of 16 rows by 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, BYTES = 16, 32  # of weights that change places with each other
SCALE_ROWS, SCALE_GROUPS = 64, 4
# Bits of four bytes as one number that move together: which, and how far up.
_MOVES = (
    (0x80, 24), (0x70, 18), (0x08, 12), (0x07, 6),
    (0x8000, 13), (0x7000, 7), (0x0800, 1), (0x0700, -5),
    (0x800000, 2), (0x700000, -4), (0x080000, -10), (0x070000, -16),
    (0x80000000, -1), (0x10000000, 1), (0x60000000, -3), (0x08000000, -13), (0x01000000, -11), (0x06000000, -15),
)  # fmt: skip
_BACK = tuple((bits << far if far > 0 else bits >> -far, -far) for bits, far in _MOVES)


def interleaved(codes: Tensor) -> Tensor:
    """Bytes [E, N, B]; N is a multiple of 16, B of 32."""
    made = torch.empty_like(codes, memory_format=torch.contiguous_format)
    for expert, of in zip(made, codes, strict=True):
        count, width = of.shape
        parts = of.reshape(count // ROWS, 2, 8, width // BYTES, 2, 2, 2, 4)  # two rows; columns 16, 8 and 4 apart
        fours = parts.permute(0, 5, 2, 3, 4, 7, 6, 1).contiguous()
        expert.copy_(_moved(fours, _MOVES).view(count, width))
    return made


def deinterleaved(codes: Tensor) -> Tensor:
    """The inverse of `interleaved`."""
    made = torch.empty_like(codes, memory_format=torch.contiguous_format)
    for expert, of in zip(made, codes, strict=True):
        count, width = of.shape
        fours = _moved(of.contiguous(), _BACK).view(count // ROWS, 2, 8, width // BYTES, 2, 4, 2, 2)
        expert.copy_(fours.permute(0, 7, 2, 3, 4, 1, 6, 5).reshape(count, width))
    return made


def folded(scale: Tensor) -> Tensor:
    """Bytes [E, N, K / 32] as [E, N / 64, K / 128, 16, 16]; N is a multiple of 64, K of 128."""
    experts, rows, groups = scale.shape
    parts = scale.reshape(experts, rows // SCALE_ROWS, 4, 16, groups // SCALE_GROUPS, SCALE_GROUPS)
    blocks = parts.permute(0, 1, 4, 3, 2, 5)
    return blocks.reshape(experts, rows // SCALE_ROWS, groups // SCALE_GROUPS, 16, 16).contiguous()


def unfolded(blocks: Tensor) -> Tensor:
    """The inverse of `folded`."""
    experts, high, wide = blocks.shape[:3]
    parts = blocks.reshape(experts, high, wide, 16, 4, SCALE_GROUPS)
    return parts.permute(0, 1, 4, 3, 2, 5).reshape(experts, high * SCALE_ROWS, wide * SCALE_GROUPS)


def _moved(fours: Tensor, moves: tuple[tuple[int, int], ...]) -> Tensor:
    """Each four adjacent bytes, as a little-endian number, with its bits moved."""
    numbers = fours.flatten().view(torch.int32).long() & 0xFFFFFFFF
    made = torch.zeros_like(numbers)
    for bits, far in moves:
        part = numbers & bits
        made |= part << far if far > 0 else part >> -far
    made -= (made >> 31) << 32  # as int32
    return made.int().view(torch.uint8)
