"""Latent decode as our kernels for sm_90 see it: rows of queries and of pages of 64, and parts of equal work."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.shared.decode_parts import parts_alike
from kernelhub.backends.shared.operands import contiguous_copy, is_aligned

_ROWS = 64  # of a tile
_MANY_SEQS = 32  # from which on sequences are cut alike: with 8 of 8192 keys that took 3 % more
_PAGE, _WIDTH, _LATENT = 64, 576, 512


def cut(rows: int, num_seqs: int, num_sms: int, alike: bool = True) -> tuple[int, int]:
    """Tiles of the rows of a sequence, and the parts of the work on each of them.

    A part that begins within a sequence writes float32 sums, which are merged. Up to a twentieth of the
    multiprocessors are left idle where sequences of one length are then cut alike, or not at all; not unless `alike`.
    """
    tiles = -(-rows // _ROWS)
    most = max(1, num_sms // tiles)
    if not alike or tiles == 1 or num_seqs < _MANY_SEQS:
        return tiles, most
    return tiles, parts_alike(most, num_seqs)


def sums_of_parts(tiles: int, parts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for the float32 sums and the LSE of two sequences of each part: that it begins in, and that it ends in."""
    slots = 2 * parts * tiles * _ROWS
    out = torch.empty(slots, _LATENT, dtype=torch.float32, device=device)
    return out, torch.empty(slots, dtype=torch.float32, device=device)


def sums_bytes(num_heads: int, num_seqs: int, num_tokens: int, num_sms: int) -> int:
    """Most bytes of `sums_of_parts`: fewer sequences may have more parts, those of all tiles are no more than this."""
    rows = -(-num_tokens // max(1, num_seqs)) * num_heads
    most = max(num_sms, -(-rows // _ROWS))
    return 2 * most * _ROWS * (_LATENT + 1) * 4


def rows_of_queries(q: Tensor, tokens: int, heads: int) -> tuple[Tensor, int]:
    """q as rows [rows, 576], those of a sequence adjacent, and the rows between two sequences; or a copy."""
    sequence, row = q.stride(0), q.stride(-2)
    apart = tokens > 1 and q.stride(1) != heads * row
    if not is_aligned(q) or apart or sequence % row or sequence < tokens * heads * row:
        q = contiguous_copy(q)
        sequence, row = tokens * heads * _WIDTH, _WIDTH
    rows = (q.shape[0] - 1) * (sequence // row) + tokens * heads
    return q.as_strided((rows, _WIDTH), (row, 1)), sequence // row


def rows_of_pages(kv_cache: Tensor) -> tuple[Tensor, int]:
    """The cache as rows [rows, 576], and the rows between two pages; copied where TMA cannot read it so."""
    page, row = kv_cache.stride(0), kv_cache.stride(1)
    if not is_aligned(kv_cache) or page % row or page < _PAGE * row:
        kv_cache = contiguous_copy(kv_cache)
        page, row = _PAGE * _WIDTH, _WIDTH
    rows = (kv_cache.shape[0] - 1) * (page // row) + _PAGE
    return kv_cache.as_strided((rows, _WIDTH), (row, 1)), page // row
