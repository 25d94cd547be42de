"""Where the queries of a step are that see a key, and running a kernel on them alone.

TensorRT-LLM's kernels of many queries, and CUTLASS's, are not given the others: nothing is written of what they would
do then.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.backends.flashinfer.steps import int32, seeing
from kernelhub.backends.shared.operands import aligned
from kernelhub.ops.attention.adapter import DenseStep


class Packed(NamedTuple):
    """Where the queries that see a key, and their keys, are.

    Attributes:
        rows: which rows of q they are, or None for all.
        num_rows: rows of q that belong to a sequence.
        q_offsets: int32 [n + 1] on the device, n the number of sequences that have such queries.
        kv_offsets: int32 [n + 1] on the device.
        kv_lens: int32 [n] on the device.
        q_lens: queries of each of them, on the host.
        most_q: queries of the longest.
        most_kv: keys of the longest.
        sequences: which sequences they are, or None for all.
    """

    rows: Tensor | None
    num_rows: int
    q_offsets: Tensor
    kv_offsets: Tensor
    kv_lens: Tensor
    q_lens: list[int]
    most_q: int
    most_kv: int
    sequences: list[int] | None


def packed(q_offsets: list[int], kv_lens: list[int], causal: bool, device: torch.device) -> Packed:
    """The queries of sequences with these offsets, and how many keys each has."""
    seen = seeing(q_offsets, kv_lens, causal, device)

    def there(values: list[int]) -> Tensor:
        return int32(values).to(device, non_blocking=True)

    return Packed(
        seen.rows,
        q_offsets[-1],
        there([0, *accumulate(seen.q_lens)]),
        there([0, *accumulate(seen.kv_lens)]),
        there(seen.kv_lens),
        seen.q_lens,
        max(seen.q_lens, default=0),
        max(seen.kv_lens, default=0),
        seen.sequences,
    )


def packed_dense(
    step: DenseStep, shape: tuple[int, ...], causal: bool, device: torch.device
) -> tuple[Packed, Tensor | None]:
    """The queries of a step of `attention`, and which keys they need as int64 on the device, None for all.

    Args:
        step: lengths.
        shape: sequences, queries and keys of each, for a batch; else empty.
        causal: queries see no later keys.
        device: where the tensors are.
    """
    if shape:
        batch, q_len, k_len = shape
        q_offsets, k_offsets = ([length * i for i in range(batch + 1)] for length in (q_len, k_len))
    else:
        q_offsets, k_offsets = step.q_offsets(), step.k_offsets()
    spans = [range(*ends) for ends in pairwise(k_offsets)]
    at = packed(q_offsets, [len(span) for span in spans], causal, device)
    if at.sequences is None:
        return at, None
    keys = [key for i in at.sequences for key in spans[i]]
    return at, torch.tensor(keys, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def spread(run: Callable[[Tensor, Tensor], Any], at: Packed, q: Tensor, factor: float, out: Tensor) -> None:
    """Run on the queries that see a key, and write zeros for the others.

    Args:
        run: takes q and out of [T, H, D], both without gaps and aligned.
        at: where they are.
        q: [T, H, D] or [num_seqs, tokens, H, D].
        factor: what q is multiplied by first.
        out: as q, of its own width.
    """
    if q.ndim == 4:
        q = q.flatten(0, 1)
    elif at.num_rows != q.shape[0]:
        q, out = q[: at.num_rows], out[: at.num_rows]
    if at.rows is not None:
        q = q[at.rows]
    if factor != 1.0:
        q = q * factor
    direct = at.rows is None and out.is_contiguous() and not out.data_ptr() & 15
    made = out.view(-1, *out.shape[-2:]) if direct else out.new_empty((*q.shape[:-1], out.shape[-1]))
    if q.shape[0]:
        run(aligned(q.contiguous()), made)
    if direct:
        return
    if at.rows is not None:
        whole = out.new_zeros((at.num_rows, *made.shape[1:]))
        made = whole.index_copy_(0, at.rows, made)
    out.copy_(made.view(out.shape))
