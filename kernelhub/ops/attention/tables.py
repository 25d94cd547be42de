"""Metadata of a paged step, filled up on the device for kernels whose graphs are made for bounds of sizes."""

from __future__ import annotations

import torch
from torch import Tensor


def filled_table(block_table: Tensor, seq_lens: Tensor, page_size: int, rows: int, columns: int) -> Tensor:
    """A block table with rows for sequences that are none, and with a page that may be read wherever there was none.

    Behind a sequence's pages its first one stands, of which tiles that reach there load what is finite.

    Args:
        block_table: int32 [num_seqs, max_pages]. Behind a sequence's pages anything may stand.
        seq_lens: int32 [num_seqs].
        page_size: tokens of a page.
        rows: sequences, no fewer than there are.
        columns: pages of a sequence, no fewer than any has.

    Returns:
        int32 [rows, columns], contiguous. Rows of sequences without keys are zeros.
    """
    num_seqs, width = block_table.shape
    full = block_table.new_zeros(rows, columns)
    if width:
        pages = ((seq_lens + (page_size - 1)) // page_size)[:, None]
        first = torch.where(pages > 0, block_table[:, :1], 0)
        column = torch.arange(columns, dtype=torch.int32, device=block_table.device)
        shown = min(width, columns)
        full[:num_seqs] = first
        full[:num_seqs, :shown] = torch.where(column[:shown] < pages, block_table[:, :shown], first)
    return full


def filled_lengths(seq_lens: Tensor, rows: int) -> Tensor:
    """int32 [rows, 1, 1, 1] of int32 [num_seqs], with sequences added that are empty."""
    full = seq_lens.new_zeros(rows, 1, 1, 1)
    full[: seq_lens.shape[0], 0, 0, 0] = seq_lens
    return full
