"""What decode in parts of equal work shares, whatever its keys are: how sequences are cut, and strides of results."""

from __future__ import annotations

from torch import Tensor


def parts_alike(most: int, num_seqs: int) -> int:
    """At most so many parts, so that sequences of one length are cut alike, or not at all.

    Up to a twentieth of what runs at once is left out for that; else there are as many parts as may be.
    """
    parts = -(-num_seqs // -(-num_seqs // most)) if num_seqs > most else most // num_seqs * num_seqs
    return parts if parts * 20 >= most * 19 else most


def strides_of_tokens(tensor: Tensor) -> tuple[int, int, int]:
    """(sequence, token, head) strides of out."""
    if tensor.ndim == 4:
        sequence, token, head, _ = tensor.stride()
        return sequence, token, head
    return tensor.stride(0), 0, tensor.stride(1)


def strides_of_lse(lse: Tensor | None, tokens: int) -> tuple[int, int, int]:
    """(sequence, head, token) strides of the LSE, [H, sequences] or [sequences, H, tokens]."""
    if lse is None:
        return 0, 0, 0
    if lse.ndim == 3:
        sequence, head, token = lse.stride()
        return sequence, head, token
    return lse.stride(1), lse.stride(0), 0
