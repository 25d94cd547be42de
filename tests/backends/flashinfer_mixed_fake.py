"""Float4 weights as CUTLASS's mixed products for sm_90 read them: bit by bit, from 16 rows by 32 bytes."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tests.backends.flashinfer_trtllm_fake import in_floats as values

# Of eight codes in four bytes: where the bits of each byte go, highest first.
BITS = (
    (31, 24, 23, 22, 15, 8, 7, 6),
    (28, 21, 20, 19, 12, 5, 4, 3),
    (25, 18, 17, 16, 9, 2, 1, 0),
    (30, 27, 26, 29, 14, 11, 10, 13),
)


@functools.cache
def bits_of_tile() -> Tensor:
    """Of each bit of 16 rows by 32 bytes, in memory's order, where it is kept."""
    where = torch.empty(16, 32, 8, dtype=torch.long)
    for row in range(8):
        for lane in range(16):
            mma, low = divmod(lane, 4)
            column = 8 * mma + low
            first = 32 * (row + mma % 2 * 8) + 16 * (lane // 8) + 4 * low  # the byte where the four begin
            sources = ((row, column), (row + 8, column), (row, column + 4), (row + 8, column + 4))
            for byte, (r, c) in enumerate(sources):
                for place, bit in enumerate(BITS[byte]):
                    where[r, c, 7 - place] = 8 * first + bit
    return where


def codes_in_order(codes: Tensor) -> Tensor:
    """Bytes [E, N, B] as they were."""
    experts, rows, width = codes.shape
    places = torch.arange(8, dtype=torch.uint8)
    bits = (codes.unsqueeze(-1) >> places) & 1
    tiles = bits.view(experts, rows // 16, 16, width // 32, 32 * 8).transpose(2, 3)
    kept = tiles.reshape(experts, rows // 16, width // 32, -1)[..., bits_of_tile().flatten()]
    kept = kept.view(experts, rows // 16, width // 32, 16, 32, 8).transpose(2, 3).reshape(experts, rows, width, 8)
    return (kept << places).sum(3).to(torch.uint8)


def in_floats(codes: Tensor, blocks: Tensor) -> Tensor:
    """Weights [E, N, K] of interleaved codes [E, N, K / 2] and folded scales [E, N / 64, K / 128, 16, 16]."""
    experts, rows, half = codes.shape
    assert blocks.shape == (experts, rows // 64, half // 64, 16, 16)
    assert blocks.is_contiguous()
    row, group = torch.arange(rows)[:, None], torch.arange(half // 16)[None]
    exponents = blocks[:, row // 64, group // 4, row % 16, row % 64 // 16 * 4 + group % 4]
    return torch.stack([values(*pair) for pair in zip(codes_in_order(codes), exponents, strict=True)])
