"""`merge_attention_states` by FlashInfer's kernels, which take a base-2 LSE [T, H] and no parts without keys.

LSE are given less the largest of their row: then exponents of large ones are exact, and what comes back is a log of a
sum between one and the number of parts. A part without keys is given zeros and a weight that is zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from flashinfer.cascade import merge_state_in_place, merge_states
from torch import Tensor

from kernelhub.backends.flashinfer.steps import LN2
from kernelhub.backends.shared.operands import is_row_major, on_device_of
from kernelhub.ops.merge.adapter import MergeAdapter
from kernelhub.ops.merge.problem import TWO, MergeProblem

_LOG2E = 1.0 / LN2
_NO_WEIGHT = -1e4  # 2 to this is zero
_MOST_THREADS = 512  # of a block, half of what there may be: a thread keeps three vectors of up to 16 numbers
_MOST_ELEMENTS = (1 << 32) - 1  # of a launch, which are counted by 32 bits


class Merge(MergeAdapter):
    """Two states in place, more from one tensor of them all; a block of threads merges some heads of a token."""

    def __init__(self, problem: MergeProblem) -> None:
        super().__init__(problem)
        self._block = heads_of_a_block(problem.num_heads, problem.head_dim)
        if problem.device.type == "cuda":  # one token, to load or compile the module
            out = torch.zeros(
                1, problem.num_heads, problem.head_dim, dtype=getattr(torch, problem.dtype), device="cuda"
            )
            lse = torch.zeros(problem.num_heads, 1, device="cuda", dtype=torch.float32)
            if problem.batched:
                out, lse = out[None], lse[None]
            parts = 2 if problem.parts == TWO else 3
            self.launch([out] * parts, [lse] * parts, torch.empty_like(out), None)

    def launch(
        self,
        outs: Sequence[Tensor] | Tensor,
        lses: Sequence[Tensor] | Tensor,
        out: Tensor,
        lse: Tensor | None,
        out_scale: float | Tensor | None = None,
    ) -> None:
        scores = torch.stack([part.transpose(-1, -2).reshape(-1, self.problem.num_heads) for part in lses])
        empty = scores.isinf()
        largest = scores.masked_fill(empty, -math.inf).amax(0)
        none = largest == -math.inf
        base = largest.masked_fill(none, 0.0)
        logs = ((scores - base) * _LOG2E).masked_fill(empty, _NO_WEIGHT)
        states = [part.reshape(-1, *part.shape[-2:]) for part in outs]
        with on_device_of(out):
            made = out if is_row_major(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
            merged = made.view(states[0].shape)
            sums = (
                self._two(states, logs, empty, merged) if len(states) == 2 else self._many(states, logs, empty, merged)
            )
            if made is not out:
                out.copy_(made)
            if lse is not None:
                total = torch.add(base, sums, alpha=LN2).masked_fill_(none, -math.inf)
                lse.copy_(total.view(*out.shape[:-1]).transpose(-1, -2))

    def _two(self, states: list[Tensor], logs: Tensor, empty: Tensor, merged: Tensor) -> Tensor:
        """Merge into `merged`, which may be either state; the logs of sums [rows, H]."""
        zero = merged.new_zeros(())
        # Without `out` the result has the strides of the state, and the library takes a contiguous one.
        other = torch.where(empty[1].unsqueeze(-1), zero, states[1], out=merged.new_empty(merged.shape))
        torch.where(empty[0].unsqueeze(-1), zero, states[0], out=merged)
        sums, of_other = logs.unbind()
        for rows in self._pieces(merged.shape, 1):
            blocks = (self._in_blocks(part[rows]) for part in (merged, sums, other, of_other))
            merge_state_in_place(*blocks)
        return sums

    def _many(self, states: list[Tensor], logs: Tensor, empty: Tensor, merged: Tensor) -> Tensor:
        """As `_two`, from a tensor [positions, parts, heads, D], where a position is some heads of a token."""
        parts, width = len(states), self.problem.head_dim
        sums = torch.empty_like(logs[0])
        zero = merged.new_zeros(())
        for rows in self._pieces(merged.shape, parts):
            count = logs[0, rows].numel()
            # For no more positions than parts the library has a kernel that rounds in between; more are made up.
            block = self._block if count // self._block > parts else 1
            positions = max(count // block, parts + 1)
            values = merged.new_empty(positions, parts, block, width)
            weights = logs.new_empty(positions, parts, block)
            real = count // block
            values[real:], weights[real:] = 0.0, 0.0
            for part in range(parts):
                place = values[:real, part]
                given, lacks = states[part][rows].reshape(place.shape), empty[part, rows].reshape(place.shape[:-1])
                torch.where(lacks.unsqueeze(-1), zero, given, out=place)
                weights[:real, part] = logs[part, rows].reshape(real, block)
            of_values, of_logs = merge_states(values, weights)
            merged[rows] = of_values[:real].view(merged[rows].shape)
            sums[rows] = of_logs[:real].view(sums[rows].shape)
        return sums

    def _in_blocks(self, part: Tensor) -> Tensor:
        """[rows, H, ...] as [positions, heads of a block, ...]."""
        return part.view(-1, self._block, *part.shape[2:])

    def _pieces(self, shape: torch.Size, parts: int) -> list[slice]:
        """Rows that one launch counts."""
        rows, heads, width = shape
        most = max(1, _MOST_ELEMENTS // (heads * width * parts))
        return [slice(low, low + most) for low in range(0, rows, most)]


def heads_of_a_block(num_heads: int, head_dim: int) -> int:
    """The most heads, of which a token has a multiple, whose threads a block has room for.

    A thread has 8 elements of a head, or a 32nd of it; with all heads in a block, as the library does by itself, more
    than 64 heads of 128 do not start.
    """
    threads = head_dim // max(8, head_dim // 32)
    return max(heads for heads in range(1, _MOST_THREADS // threads + 1) if num_heads % heads == 0)
