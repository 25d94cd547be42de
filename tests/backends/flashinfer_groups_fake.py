"""FlashInfer's grouped products of torch on a CPU: groups are found by the addresses that are given."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import torch
from torch import Tensor


def at(address: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """The matrix that lies there."""
    assert address % 16 == 0, "descriptors begin at multiples of 16 bytes"
    memory = (ctypes.c_char * (rows * columns * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(rows, columns)


def cutlass_segment_gemm_sm90(
    workspace_buffer: Tensor, int_workspace_buffer: Tensor, all_problems: Tensor, x_data: Tensor, w_data: Tensor,
    y_data: Tensor, x_stride: Tensor, w_stride: Tensor, y_stride: Tensor, y: Tensor, empty_x_data: Tensor,
    empty_y_data: Tensor, weight_column_major: bool,
) -> None:  # fmt: skip
    assert weight_column_major
    assert workspace_buffer.numel() >= 160 * 256, "two descriptors for each multiprocessor"
    assert all_problems.dtype is torch.int32
    assert all_problems.is_contiguous()
    places = (x_data, w_data, y_data, x_stride, w_stride, y_stride)
    assert all(tensor.dtype is torch.int64 and tensor.is_contiguous() for tensor in places), "read as int64"
    dtype = empty_x_data.dtype
    assert dtype in (torch.float16, torch.bfloat16)
    assert empty_y_data.dtype is dtype, "else float8 is meant"
    for (m, n, k), x, w, out, row_x, row_w, row_y in zip(
        all_problems.tolist(), *(tensor.tolist() for tensor in places), strict=True
    ):
        assert (row_x, row_w, row_y) == (k, k, n)
        assert n % 8 == k % 8 == 0
        if m > 0:
            product = at(x, m, k, dtype).float() @ at(w, n, k, dtype).float().t()
            at(out, m, n, dtype).copy_(product)


def get_gemm_sm90_module() -> SimpleNamespace:
    return SimpleNamespace(cutlass_segment_gemm_sm90=cutlass_segment_gemm_sm90)


FUNCTIONS = (get_gemm_sm90_module,)
