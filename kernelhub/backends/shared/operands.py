"""Operands as libraries read them: aligned, without gaps, on the current device."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

_ENTERED = contextlib.nullcontext()
_current_device = getattr(torch._C, "_cuda_getDevice", None)  # None in a torch without CUDA


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the tensor's device the current one: libraries and Triton launch on the current device."""
    if _current_device is not None and tensor.is_cuda and _current_device() != tensor.get_device():
        return torch.cuda.device(tensor.device)
    return _ENTERED


def row_major(tensor: Tensor) -> Tensor:
    """The tensor, or a copy: contiguous, 16-byte aligned, and with the strides of its shape even where a size is 1."""
    if not is_row_major(tensor):
        tensor = contiguous_copy(tensor)
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= size
    wanted = tuple(reversed(strides))
    return tensor if tensor.stride() == wanted else tensor.as_strided(tensor.shape, wanted)


def is_row_major(tensor: Tensor) -> bool:
    """Whether the tensor is contiguous and 16-byte aligned, so that a library can write a result into it."""
    return tensor.is_contiguous() and not tensor.data_ptr() & 15


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where `is_aligned` does not hold."""
    return tensor if is_aligned(tensor) else contiguous_copy(tensor)


def is_aligned(tensor: Tensor) -> bool:
    """Whether the last dimension is dense and every row begins at a multiple of 16 bytes of its own.

    Kernels load rows in pieces of 16 bytes. A stride of zero does not count as aligned: descriptors of the tensor
    memory accelerator (sm_90 and later) cannot be made for it, so a broadcast operand is copied for every library.
    """
    *outer, inner = tensor.stride()
    if inner != 1:
        return False
    size, wrong = tensor.itemsize, tensor.data_ptr()
    for stride in outer:
        if stride <= 0:
            return False
        wrong |= stride * size
    return not wrong & 15


def is_writable_by_tma(tensor: Tensor) -> bool:
    """Whether TMA can write the tensor: `is_aligned`, and a row ends where 16 bytes do.

    TMA stores whole pieces of 16 bytes: of a last piece that is partly outside of the tensor it writes all, which an
    H200 showed (https://github.com/triton-lang/triton/issues/11583).
    """
    return not tensor.shape[-1] * tensor.itemsize & 15 and is_aligned(tensor)


def contiguous_copy(tensor: Tensor) -> Tensor:
    """A copy without gaps at an address of its own; `contiguous` keeps a misaligned tensor that has no gaps."""
    return tensor.clone(memory_format=torch.contiguous_format)


def adjacent(tensor: Tensor) -> Tensor:
    """The tensor, or a copy: with the elements of a row side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def most_tokens(given: int | None, tokens: int) -> int:
    """Most tokens that a sequence may have: what the caller said, or all there are."""
    return max(1, tokens if given is None else min(given, tokens))


def strides_of_scale(scale: Tensor) -> tuple[int, int]:
    """(row, column) strides; a scale of a tensor has none, one of rows none that is read between columns."""
    if scale.ndim == 2:
        return scale.stride(0), scale.stride(1)
    return (0, 0) if scale.numel() == 1 else (scale.stride(0), 0)


def up_to(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def pages_by_head(cache: Tensor, kv_layout: str) -> Tensor:
    """A paged cache as [pages, heads, tokens of a page, width], of one page at least; a copy where rows have gaps."""
    if not cache.shape[0]:  # no sequence has a key, but there has to be an address
        cache = cache.new_zeros(1, *cache.shape[1:])
    cache = aligned(cache)
    return cache.transpose(1, 2) if kv_layout == "NHD" else cache


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries and a positive factor with the same scores: libraries take the largest product before they scale."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
