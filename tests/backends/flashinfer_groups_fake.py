"""FlashInfer's grouped products of torch on a CPU: groups are found by the addresses that are given."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.backends.flashinfer_products_fake import in_blocks


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


def group_gemm_fp8_nt_groupwise(
    a, b, a_scale, b_scale, m_indptr, scale_granularity_mnk=(1, 128, 128), scale_major_mode="MN", mma_sm=1, out=None,
    out_dtype=None,
):  # fmt: skip
    groups, n, k = b.shape
    for tensor in (a, b, a_scale, b_scale, out):
        assert tensor.is_contiguous(), "pointers are read"
        assert tensor.data_ptr() % 16 == 0, "16 bytes"
    assert (scale_granularity_mnk, scale_major_mode, mma_sm) == ((1, 128, 128), "K", 1)
    assert n % 128 == k % 128 == 0
    assert a_scale.dtype is b_scale.dtype is torch.float32
    assert a_scale.shape == (a.shape[0], k // 128)
    assert b_scale.shape == (groups, n // 128, k // 128)
    assert m_indptr.dtype is torch.int32
    assert m_indptr.shape == (groups + 1,)
    assert out.shape == (a.shape[0], n)
    assert out.dtype is out_dtype
    bounds = m_indptr.tolist()
    assert bounds[0] == 0
    assert all(bound % 4 == 0 for bound in bounds), "groups begin at multiples of 4"
    assert bounds == sorted(bounds)
    assert bounds[-1] <= a.shape[0]
    out.fill_(torch.nan)
    for group in range(groups):
        rows = slice(bounds[group], bounds[group + 1])
        out[rows] = in_blocks(a[rows], b[group], a_scale[rows], b_scale[group]).to(out_dtype)
    return out


FUNCTIONS = (get_gemm_sm90_module, group_gemm_fp8_nt_groupwise)
