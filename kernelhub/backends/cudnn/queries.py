"""The queries of a call as cuDNN reads them, and its results as it writes them: sequences one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.cudnn.blank import blank_kernel
from kernelhub.backends.cudnn.graphs import Uid
from kernelhub.backends.shared.operands import contiguous_copy, is_aligned, positive_scale
from kernelhub.ops.attention.problem import AttentionProblem
from kernelhub.ops.attention.tables import bound, filled_offsets

_BLOCK = 1024  # elements that a program blanks at a time
FEWEST_TOKENS = 128  # a graph for one query leaves most heads' LSE unwritten (NVIDIA/cudnn-frontend#1083)
_WIDE = 1 << 31  # elements from which on an offset needs 64 bits


class Queries:
    """The queries of a call, and room for its results.

    Attributes:
        q: [T, H, D], rows side by side.
        scale: factor of the scores, more than zero.
        sequences: how many there are, some of them added and empty.

    Args:
        problem: what the call is.
        q: [T, H, D] or [num_seqs, tokens, H, D].
        q_at: int32 [num_seqs + 1], where the queries of each sequence begin, and end.
        scale: factor of the scores.
        out: where the result goes, as q.
        lse: where the LSE goes, or None.
    """

    def __init__(
        self, problem: AttentionProblem, q: Tensor, q_at: Tensor, scale: float, out: Tensor, lse: Tensor | None
    ) -> None:
        q, scale = positive_scale(q, scale)
        self.q, self.scale = packed(q), float(scale)
        self.sequences = bound(q_at.shape[0] - 1)
        self._at = filled_offsets(q_at, self.sequences)
        self._heads, self._width = problem.num_q_heads, problem.head_dim_vo
        self._out, self._lse = out, lse
        result = _flat(out)
        self._direct = result is not None and result.is_contiguous() and result.data_ptr() % 16 == 0
        if result is None or not self._direct:
            result = out.new_empty(self.q.shape[0], self._heads, self._width)
            if out.ndim == 3:
                result.copy_(out)  # tokens past the last offset stay as they are
        self._result = result
        self._stats: Tensor | None = None
        if lse is not None:
            self._stats = torch.empty(self.q.shape[0], self._heads, dtype=torch.float32, device=q.device)

    @property
    def wide(self) -> bool:
        """Whether offsets into them do not fit 32 bits."""
        return is_wide(self.q, self._result)

    def tensors(self, wide: bool) -> dict[int, Tensor]:
        """The tensors of a graph that they are, with offsets of 64 bits if `wide`."""
        at = self._at.long() if wide else self._at
        given = {
            Uid.Q: self.q,
            Uid.Q_LENS: self._at.diff(),
            Uid.Q_AT: at * self.q.stride(0),
            Uid.OUT: self._result,
            Uid.OUT_AT: at * (self._heads * self._width),
        }
        if self._stats is not None:
            given |= {Uid.LSE: self._stats, Uid.LSE_AT: at * self._heads}
        return given

    def blank(self, k_lens: Tensor) -> None:
        """Overwrite the results of sequences without keys; k_lens is int32 of as many elements as sequences."""
        blank_kernel[(self.sequences,)](
            self._result,
            self._stats,
            self._at,
            k_lens,
            self._heads * self._width,
            self._heads,
            HAS_LSE=self._stats is not None,
            BLOCK=_BLOCK,
        )

    def finish(self) -> None:
        """Bring the results where they go."""
        out, lse = self._out, self._lse
        if not self._direct:
            out.copy_(self._result.view(out.shape))
        if lse is not None and self._stats is not None:
            lse.copy_(self._stats.T if out.ndim == 3 else self._stats.view(*out.shape[:3]).transpose(1, 2))


def is_wide(*tensors: Tensor) -> bool:
    """Whether offsets into packed tokens do not fit 32 bits."""
    return max(tensor.shape[0] * tensor.stride(0) for tensor in tensors) >= _WIDE


def packed(tensor: Tensor) -> Tensor:
    """[tokens, heads, width] that cuDNN can read."""
    flat = _flat(tensor)
    return flat if flat is not None and is_aligned(flat) else contiguous_copy(tensor).view(-1, *tensor.shape[-2:])


def _flat(tensor: Tensor) -> Tensor | None:
    """[tokens, heads, width] of batched or packed tokens, or None where that is no view."""
    if tensor.ndim == 3:
        return tensor
    batch, tokens, heads, width = tensor.shape
    step, token, head, entry = tensor.stride()
    if step != tokens * token and batch > 1:
        return None
    return tensor.as_strided((batch * tokens, heads, width), (token, head, entry))
