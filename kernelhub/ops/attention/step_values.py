"""Values of a step's metadata: lengths within the block table, pages within the cache, offsets within the tokens.

`begin` checks them once. With KERNELHUB_CHECK=1 each run of a step checks them again, since an engine may have written
other values to the same tensors: a CUDA graph's are filled anew for every replay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernelhub.ops.arguments import refuse
from kernelhub.ops.attention.adapter import Check, DenseStep, PagedStep
from kernelhub.ops.attention.arguments import check_offsets
from kernelhub.ops.values import values_to_check

_FEW_PAGES = 256


def check_step_values(
    op: str, cache: str, page_size: int, step: DenseStep | PagedStep, q_tokens: int, keys: int
) -> None:
    """Check the current values of a step's tensors, if KERNELHUB_CHECK requires it.

    Args:
        op: for messages.
        cache: the parameter that holds the pages, for messages.
        page_size: tokens of a page, 0 without pages.
        step: that is run.
        q_tokens: rows of q.
        keys: pages of the cache, or rows of k.

    Raises:
        InvalidArgument: a value is out of range; the message names its index.
    """
    offsets = [("cu_seqlens_q", step.cu_seqlens_q, q_tokens, step.max_seqlen_q)]
    if isinstance(step, DenseStep):
        offsets.append(("cu_seqlens_k", step.cu_seqlens_k, keys, step.max_seqlen_k))
    else:
        lengths, table = values_to_check(step.seq_lens), values_to_check(step.block_table)
        if lengths is not None and table is not None:
            values = lengths.tolist()
            check_lengths(op, values, step.num_seqs, step.max_pages, page_size)
            check_pages(op, cache, table, values, page_size, keys)
    for parameter, tensor, tokens, longest in offsets:
        held = None if tensor is None else values_to_check(tensor)
        if held is not None:
            check_offsets(op, parameter, held.tolist(), step.num_seqs, tokens, longest)


def check_of_host_values(op: str, num_seqs: int, max_seqlen_q: int | None, max_pages: int, page_size: int) -> Check:
    """Check lengths and offsets that a kernel reads on the host, for every value of KERNELHUB_CHECK.

    Rows of q are not compared with them: a step may serve later calls with more rows.
    """

    def check(parameter: str, values: list[int]) -> None:
        if parameter == "seq_lens":
            check_lengths(op, values, num_seqs, max_pages, page_size)
        else:
            check_offsets(op, parameter, values, num_seqs, None, max_seqlen_q)

    return check


def _bounds(table: Tensor) -> tuple[int, int]:
    """The least and the largest of a table in CPU memory.

    After a kernel has read more than the caches hold, 128 pages take 60 µs less by Python than by operators of torch.
    """
    if table.numel() > _FEW_PAGES:
        low, high = torch.aminmax(table)
        return int(low), int(high)
    rows = table.tolist()
    return min(map(min, rows)), max(map(max, rows))


def check_lengths(op: str, lengths: Sequence[int], num_seqs: int, max_pages: int, page_size: int) -> None:
    """The block table has room for each length."""
    if len(lengths) != num_seqs:
        refuse(op, "seq_lens_cpu", f"has {len(lengths)} lengths", f"there are {num_seqs} sequences")
    room = max_pages * page_size
    for index, length in enumerate(lengths):
        if not 0 <= length <= room:
            pages = f"{max_pages} pages of {page_size}"
            refuse(
                op,
                "seq_lens",
                f"is {length} for sequence {index}",
                f"block_table has room for {room} ({pages})",
            )


def check_pages(
    op: str, cache: str, block_table: Tensor, lengths: Sequence[int], page_size: int, num_pages: int
) -> None:
    """Every page that a sequence uses is a page of the cache."""
    if not block_table.numel():
        return
    low, high = _bounds(block_table)
    if low >= 0 and high < num_pages:
        return
    used = (torch.tensor(lengths, device="cpu", dtype=torch.int64).reshape(-1, 1) + page_size - 1) // page_size
    foreign = ((block_table < 0) | (block_table >= num_pages)) & (
        torch.arange(block_table.shape[1], device="cpu") < used
    )
    if foreign.any():
        row, page_column = foreign.nonzero()[0].tolist()
        page = int(block_table[row, page_column])
        refuse(op, "block_table", f"names page {page} at [{row}, {page_column}]", f"{cache} has {num_pages} pages")
