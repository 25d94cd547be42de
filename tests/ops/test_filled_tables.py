"""Block tables filled up for kernels of bounds: what is read leads to a page of the sequence itself, or to page 0."""

from __future__ import annotations

import pytest
import torch

from kernelhub.ops.attention.tables import filled_lengths, filled_table

TABLE = torch.tensor([[5, 3, -1], [7, -9, 1 << 30], [-1, -1, -1], [2, 4, 6]], dtype=torch.int32)
LENGTHS = torch.tensor([17, 16, 0, 33], dtype=torch.int32)


def test_behind_the_pages_of_a_sequence_its_first_one_stands() -> None:
    table = filled_table(TABLE, LENGTHS, 16, 6, 4)
    assert table.tolist() == [[5, 3, 5, 5], [7] * 4, [0] * 4, [2, 4, 6, 2], [0] * 4, [0] * 4]
    assert table.dtype is torch.int32
    assert table.is_contiguous()


@pytest.mark.parametrize("columns", [0, 1])
def test_sequences_without_keys_may_have_no_columns(columns) -> None:
    table = filled_table(TABLE[:, :columns], torch.zeros_like(LENGTHS), 16, 4, 2)
    assert not table.any()
    assert table.shape == (4, 2)


def test_added_sequences_are_empty() -> None:
    lengths = filled_lengths(LENGTHS, 8)
    assert lengths.shape == (8, 1, 1, 1)
    assert lengths.view(-1).tolist() == [17, 16, 0, 33, 0, 0, 0, 0]
