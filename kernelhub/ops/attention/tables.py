"""Metadata of a step, padded on the device for kernels whose graphs are built for upper bounds of sizes."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.attention.adapter import PagedStep


def filled_table(block_table: Tensor, seq_lens: Tensor, page_size: int, rows: int, columns: int) -> Tensor:
    """A padded block table: rows for missing sequences, and a readable page in every entry.

    Entries past a sequence's pages repeat its first page, so that tiles that reach there load finite values.

    Args:
        block_table: int32 [num_seqs, max_pages]. Entries past a sequence's pages may have any value.
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


def filled_lengths(seq_lens: Tensor, rows: int, room: int) -> Tensor:
    """int32 [rows, 1, 1, 1] of int32 [num_seqs], none longer than `room`, with sequences added that are empty.

    On a GPU lengths have not been checked, and a kernel would read past the end of a row of the table.
    """
    full = seq_lens.new_zeros(rows, 1, 1, 1)
    torch.clamp(seq_lens, 0, room, out=full[: seq_lens.shape[0], 0, 0, 0])
    return full


def bound(number: int, fewest: int = 1) -> int:
    """A power of two that is no less than either; `fewest` is one itself."""
    return max(fewest, 1 << max(0, number - 1).bit_length())


def even_offsets(sequences: int, tokens: int, device: torch.device) -> Tensor:
    """int32 [sequences + 1], where sequences of as many tokens begin, and end."""
    return torch.arange(sequences + 1, dtype=torch.int32, device=device) * tokens


def filled_offsets(offsets: Tensor, sequences: int) -> Tensor:
    """int32 [sequences + 1] of int32 [num_seqs + 1], contiguous, with sequences added that are empty."""
    missing = sequences + 1 - offsets.shape[0]
    return torch.cat([offsets, offsets[-1:].expand(missing)]) if missing else offsets.contiguous()


def offsets_of_queries(step: PagedStep, q: Tensor) -> tuple[Tensor, int]:
    """int32 [num_seqs + 1], where the queries of each sequence begin, and end; and how many one has at most."""
    if step.cu_seqlens_q is None:
        tokens = q.shape[1] if q.ndim == 4 else 1
        return even_offsets(step.num_seqs, tokens, q.device), tokens
    return step.cu_seqlens_q, q.shape[0] if step.max_seqlen_q is None else min(q.shape[0], step.max_seqlen_q)
