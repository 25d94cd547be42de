"""Strides of what every call of attention has, whatever its form: rows of tokens, and their LSE."""

from __future__ import annotations

from torch import Tensor


def strides_of_tokens(tensor: Tensor, ragged: bool = False) -> tuple[int, int, int]:
    """(sequence, token, head) strides of q or out; 0 for what there is one of, or none."""
    strides = tensor.stride()
    if len(strides) == 4:
        return strides[:3]
    first, head, _ = strides
    return (0, first, head) if ragged else (first, 0, head)


def strides_of_lse(lse: Tensor | None, ragged: bool = False) -> tuple[int, int, int]:
    """(sequence, head, token) strides of the LSE, [sequences, H, tokens] or [H, sequences]; if ragged, [H, tokens]."""
    if lse is None:
        return 0, 0, 0
    strides = lse.stride()
    if len(strides) == 3:
        return strides
    head, last = strides
    return (0, head, last) if ragged else (last, head, 0)
