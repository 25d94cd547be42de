"""The queries of a call as cuDNN reads them, and its results as it writes them: sequences one after the other."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.cudnn.blank import blank_kernel
from kernelhub.backends.cudnn.graphs import Uid
from kernelhub.ops.attention.problem import AttentionProblem

_BLOCK = 1024  # elements that a program blanks at a time
_WIDE = 1 << 31  # elements from which on an offset asks for 64 bits


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
        if scale <= 0:  # cuDNN takes the maximum before it scales
            q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
        self.q, self.scale = packed(q), float(scale)
        self.sequences = bound_of_sequences(q_at.shape[0] - 1)
        self._at = padded(q_at, self.sequences + 1)
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


def bound_of_sequences(number: int) -> int:
    """A power of two that is no less; the added ones are empty."""
    return 1 << (number - 1).bit_length()


def is_wide(*tensors: Tensor) -> bool:
    """Whether offsets into packed tokens do not fit 32 bits."""
    return max(tensor.shape[0] * tensor.stride(0) for tensor in tensors) >= _WIDE


def padded(offsets: Tensor, length: int) -> Tensor:
    """Offsets with sequences added that are empty."""
    if offsets.shape[0] == length:
        return offsets.contiguous()
    return torch.cat([offsets, offsets[-1:].expand(length - offsets.shape[0])])


def evenly(sequences: int, tokens: int, device: torch.device) -> Tensor:
    """int32 [sequences + 1], where sequences of as many tokens begin, and end."""
    return torch.arange(0, sequences * tokens + 1, tokens, dtype=torch.int32, device=device)


def readable(tensor: Tensor) -> bool:
    """Whether cuDNN can read the tensor where it lies: rows side by side, steps of 16 bytes."""
    *steps, entry = tensor.stride()
    return entry == 1 and all(step > 0 and step % 8 == 0 for step in steps) and tensor.data_ptr() % 16 == 0


def packed(tensor: Tensor) -> Tensor:
    """[tokens, heads, width] that cuDNN can read."""
    flat = _flat(tensor)
    return flat if flat is not None and readable(flat) else copied(tensor).view(-1, *tensor.shape[-2:])


def copied(tensor: Tensor) -> Tensor:
    """A copy that cuDNN can read; `contiguous` would leave addresses and steps as they are of what has no gaps."""
    return tensor.clone(memory_format=torch.contiguous_format)


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """cuDNN's handles belong to the current device, so that must be the operands' one."""
    if tensor.is_cuda and torch.cuda.current_device() != tensor.get_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


def _flat(tensor: Tensor) -> Tensor | None:
    """[tokens, heads, width] of batched or packed tokens, or None where that is no view."""
    if tensor.ndim == 3:
        return tensor
    batch, tokens, heads, width = tensor.shape
    step, token, head, entry = tensor.stride()
    if step != tokens * token and batch > 1:
        return None
    return tensor.as_strided((batch * tokens, heads, width), (token, head, entry))
