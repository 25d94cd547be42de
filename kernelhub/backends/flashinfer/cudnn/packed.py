"""Arguments of the library for many queries: packed queries, their offsets, and memory for results.

Offsets count elements, and lengths are read on the device: the host has upper bounds of sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernelhub.backends.flashinfer.cudnn.library import TAKES_BASE
from kernelhub.backends.shared.operands import contiguous_copy, positive_scale
from kernelhub.ops.attention.problem import AttentionProblem
from kernelhub.ops.attention.tables import bound, filled_offsets

WIDE = 1 << 31  # elements from which on an offset needs 64 bits


class Given(NamedTuple):
    """The library's arguments for the queries of a call.

    Attributes:
        lens: int32 [sequences, 1, 1, 1], queries of each sequence.
        at: [sequences + 1, 1, 1, 1], where those of each begin in q.
        out_at: and where their results do.
        lse_at: and their LSE, or None.
        out: [T, H, D].
        lse: float32 [T, H], or before 0.7.1 [sequences, most queries, H], of which the beginning is used; or None.
    """

    lens: Tensor
    at: Tensor
    out_at: Tensor
    lse_at: Tensor | None
    out: Tensor
    lse: Tensor | None


class PackedQueries:
    """The queries of a call, and room for its results.

    Attributes:
        q: [T, H, D], without gaps.
        scale: factor of the scores, more than zero.
        sequences: how many there are, a power of two, the added ones empty.
        most: queries of a sequence, at most.

    Args:
        problem: what the call is.
        q: [T, H, D] or [num_seqs, tokens, H, D].
        q_at: int32 [num_seqs + 1], where the queries of each sequence begin, and end.
        most: queries of a sequence, at most.
        scale: factor of the scores.
        out: where the result goes, as q.
        lse: where the LSE goes, or None.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        q: Tensor,
        q_at: Tensor,
        most: int,
        scale: float,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        q, scale = positive_scale(q, scale)
        self.q, self.scale, self.most = flat(q), float(scale), most
        self.sequences = bound(q_at.shape[0] - 1)
        self.at = filled_offsets(q_at, self.sequences)
        self._heads, self._widths = problem.num_q_heads, (problem.head_dim_qk, problem.head_dim_vo)
        self._out, self._lse = out, lse
        self._direct = out.is_contiguous() and not out.data_ptr() & 15
        self._result = flat(out) if self._direct else self._room()
        self._stats: Tensor | None = None
        if lse is not None:
            tokens = self.q.shape[0] if TAKES_BASE else max(self.q.shape[0], self.sequences * most)
            self._stats = torch.empty(tokens, self._heads, dtype=torch.float32, device=q.device)

    @property
    def wide(self) -> bool:
        """Whether offsets do not fit 32 bits."""
        return self.q.shape[0] * self._heads * max(self._widths) >= WIDE

    def given(self, wide: bool) -> Given:
        """The library's arguments that they are, with offsets of 64 bits if `wide`."""
        qk, vo = self._widths
        at = (self.at.long() if wide else self.at).view(-1, 1, 1, 1)
        stats = self._stats
        return Given(
            lens=self.at.diff().view(-1, 1, 1, 1),
            at=at * (self._heads * qk),
            out_at=at * (self._heads * vo),
            lse_at=None if stats is None else at * self._heads,
            out=self._result,
            lse=stats if stats is None or TAKES_BASE else self._padded_stats(stats),
        )

    def finish(self, k_lens: Tensor) -> None:
        """Bring results where they go, with zeros and -inf for queries of sequences without keys.

        Args:
            k_lens: keys of each sequence, as many elements as there are sequences.
        """
        out, lse = self._out, self._lse
        token = torch.arange(self.q.shape[0], dtype=torch.int32, device=out.device)
        sequence = torch.bucketize(token, self.at[1:], right=True)
        owned = sequence < self.sequences
        blind = owned & (k_lens.view(-1)[sequence.clamp(max=self.sequences - 1)] == 0)
        self._result.masked_fill_(blind[:, None, None], 0.0)
        if not self._direct:
            out.copy_(self._result.view(out.shape))
        if lse is not None and self._stats is not None:
            stats = self._stats[: self.q.shape[0]].masked_fill(blind[:, None], -torch.inf)
            if lse.ndim == 2:  # tokens past the last offset keep what they have
                lse.copy_(torch.where(owned, stats.t(), lse))
            else:
                lse.copy_(stats.view(*out.shape[:3]).transpose(1, 2))

    def _room(self) -> Tensor:
        """Memory for a result with the current values of the rows past the last offset."""
        room = self._out.new_empty(self.q.shape[0], *self._out.shape[-2:])
        return room.copy_(self._out) if self._out.ndim == 3 else room

    def _padded_stats(self, stats: Tensor) -> Tensor:
        """The memory in the shape that releases before 0.7.1 require; offsets use its beginning."""
        return stats[: self.sequences * self.most].view(self.sequences, self.most, self._heads)


def flat(tensor: Tensor) -> Tensor:
    """[tokens, heads, width] without gaps, at an address that is a multiple of 16 bytes."""
    made = tensor if tensor.is_contiguous() and not tensor.data_ptr() & 15 else contiguous_copy(tensor)
    heads, width = made.shape[-2:]
    return made.as_strided((made[..., 0, 0].numel(), heads, width), (heads * width, width, 1))  # also where one is 1
