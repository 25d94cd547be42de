"""What stand-ins ask of small tensors whose pointers a library is given: scales, learned scores of heads, metadata."""

from __future__ import annotations

from torch import Tensor


def check_small(*tensors: Tensor | None) -> None:
    """Element after element, from 16 bytes on: libraries load vectors, and read no strides."""
    for tensor in tensors:
        if tensor is not None:
            assert tensor.is_contiguous(), tensor.stride()
            assert tensor.data_ptr() % 16 == 0, "16 bytes"
