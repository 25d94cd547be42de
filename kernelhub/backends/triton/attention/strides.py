"""Strides of operands in every form of an attention call, and when those of two calls are alike."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from kernelhub.backends.shared.strides import strides_of_tokens


def strides_of_operands(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, ragged: bool, heads_first: bool
) -> tuple[int, ...]:
    """Of q, k, v and out, four each."""
    return (
        *strides_of_rows(q, ragged),
        *_strides_of_kv(k, heads_first),
        *_strides_of_kv(v, heads_first),
        *strides_of_rows(out, ragged),
    )


def strides_of_rows(tensor: Tensor, ragged: bool) -> tuple[int, ...]:
    """(sequence, token, head, width) strides of q or out."""
    return (*strides_of_tokens(tensor, ragged), tensor.stride(-1))


def variant_of(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, sinks: Tensor | None, strides: tuple[int, ...]
) -> Hashable | None:
    """All that a compiled variant depends on beyond the problem; None where an operand is not aligned to 16 bytes.

    The dtypes of q, k and v are the problem's; lengths, tables and scales have one dtype each, and kernels do
    not specialise on their alignment.
    """
    if (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) & 15:
        return None
    return (q.get_device(), out.dtype, None if sinks is None else sinks.dtype, strides)


def _strides_of_kv(tensor: Tensor, heads_first: bool) -> tuple[int, ...]:
    """(sequence or page, token, head, width) strides of k or v."""
    strides = tensor.stride()
    if len(strides) == 3:
        return (0, *strides)
    if heads_first:
        page, head, token, width = strides
        return (page, token, head, width)
    return strides
