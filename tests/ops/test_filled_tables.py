"""Block tables filled up for kernels of bounds: what is read leads to a page of the sequence itself, or to page 0."""

from __future__ import annotations

import pytest
import torch

from kernelhub.ops.attention.tables import bound, even_offsets, filled_lengths, filled_offsets, filled_table

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
    lengths = filled_lengths(LENGTHS, 8, 48)
    assert lengths.shape == (8, 1, 1, 1)
    assert lengths.view(-1).tolist() == [17, 16, 0, 33, 0, 0, 0, 0]


def test_no_length_is_past_what_the_table_has_room_for() -> None:
    """On a GPU nobody has looked at them."""
    wrong = torch.tensor([17, -4, 0x7FFFFFFF], dtype=torch.int32)
    assert filled_lengths(wrong, 4, 48).view(-1).tolist() == [17, 0, 48, 0]


def test_bounds_are_powers_of_two_and_no_less_than_the_fewest() -> None:
    assert [bound(number) for number in (0, 1, 2, 3, 1024, 1025)] == [1, 1, 2, 4, 1024, 2048]
    assert [bound(number, 128) for number in (0, 128, 129)] == [128, 128, 256]


def test_offsets_of_added_sequences_end_where_the_last_does() -> None:
    assert even_offsets(3, 5, torch.device("cpu")).tolist() == [0, 5, 10, 15]
    assert even_offsets(2, 0, torch.device("cpu")).tolist() == [0, 0, 0]
    spread = torch.tensor([0, 9, 3, 9, 7, 9], dtype=torch.int32)[::2]
    assert filled_offsets(spread, 4).tolist() == [0, 3, 7, 7, 7]
    assert filled_offsets(spread, 2).is_contiguous()
