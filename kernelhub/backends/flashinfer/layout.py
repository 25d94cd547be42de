"""Where the queries and keys of a step are, as FlashInfer's wrappers want to be told."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kernelhub.ops.attention.adapter import PagedStep


class Pages(NamedTuple):
    """The keys of a paged step in compressed rows.

    Attributes:
        offsets: int32 [num_seqs + 1] on the host, where the pages of each sequence begin in `indices`.
        indices: int32 [offsets[-1]] on the device, the pages of all sequences one after the other.
        last: int32 [num_seqs] on the host, tokens in each sequence's last page.
    """

    offsets: Tensor
    indices: Tensor
    last: Tensor


def pages_of(step: PagedStep, page_size: int) -> Pages:
    """Compress the block table. The host's lengths tell all sizes, so the device is not waited for."""
    lengths = step.lengths()
    counts = [-(-length // page_size) for length in lengths]
    offsets = int32([0, *accumulate(counts)])
    last = int32(
        [length - (count - 1) * page_size if count else 0 for length, count in zip(lengths, counts, strict=True)]
    )
    table, total = step.block_table, sum(counts)
    device = table.device
    if total == 0:
        return Pages(offsets, torch.zeros(1, dtype=torch.int32, device=device), last)
    on_device = offsets.to(device, non_blocking=True)
    rows = torch.arange(step.num_seqs, dtype=torch.int32, device=device)
    row = rows.repeat_interleave(on_device.diff(), output_size=total)
    column = torch.arange(total, dtype=torch.int32, device=device) - on_device[row]
    return Pages(offsets, table[row, column].contiguous(), last)


def first_page(device: torch.device) -> Pages:
    """One sequence of one token in page 0."""
    return Pages(int32([0, 1]), torch.zeros(1, dtype=torch.int32, device=device), int32([1]))


def query_offsets(step: PagedStep, tokens: int) -> list[int]:
    """Where the queries of each sequence begin, and end; `tokens` are those of each, unless they are ragged."""
    if step.cu_seqlens_q is not None:
        return step.q_offsets()
    return [tokens * place for place in range(step.num_seqs + 1)]


def unseeing(q_offsets: Sequence[int], kv_lens: Sequence[int], causal: bool, device: torch.device) -> Tensor | None:
    """Rows of q that see no key, as indices on the device; None if every row sees one.

    Kernels leave there whatever they did of masked scores, and the op promises zeros.
    """
    blind: list[int] = []
    for start, end, length in zip(q_offsets, q_offsets[1:], kv_lens, strict=False):
        hidden = end - start if length == 0 else max(0, end - start - length) if causal else 0
        blind.extend(range(start, start + hidden))
    if not blind:
        return None
    return torch.tensor(blind, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


class Seeing(NamedTuple):
    """The queries that see a key, for kernels that are not right where others are among them.

    Attributes:
        rows: int64 on the device, which rows of q they are; None for all of them.
        sequences: the sequences that have any; None for all of them.
        q_lens: how many of them each of those sequences has.
        kv_lens: and how many keys.
    """

    rows: Tensor | None
    sequences: list[int] | None
    q_lens: list[int]
    kv_lens: list[int]


def seeing(q_offsets: Sequence[int], kv_lens: Sequence[int], causal: bool, device: torch.device) -> Seeing:
    """The rows of q that see a key: those at the end of each sequence, if causal."""
    counts = [
        min(end - start, length) if causal or not length else end - start
        for start, end, length in zip(q_offsets, q_offsets[1:], kv_lens, strict=False)
    ]
    rows: Tensor | None = None
    if sum(counts) < q_offsets[-1]:
        seen = [row for end, count in zip(q_offsets[1:], counts, strict=True) for row in range(end - count, end)]
        rows = torch.tensor(seen, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
    sequences = [i for i, count in enumerate(counts) if count]
    return Seeing(
        rows,
        sequences if len(sequences) < len(counts) else None,
        [counts[i] for i in sequences],
        [kv_lens[i] for i in sequences],
    )


def int32(values: Sequence[int]) -> Tensor:
    """A tensor on the host, as plans are made from."""
    return torch.tensor(values, dtype=torch.int32, device="cpu")
