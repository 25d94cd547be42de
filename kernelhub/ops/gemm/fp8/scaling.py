"""The granularity of scales, derived from their shape and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.formats import E8M0, from_e8m0
from kernelhub.ops.gemm.fp8.problem import BLOCK, GROUP, MX, ROW, ROW_BLOCK, TENSOR

_SCALE_TYPES = (torch.float32, E8M0, torch.uint8)
# (of a, of b) -> scaling, in the order in which they are tried where several fit, which then mean the same.
_PAIRS = (
    ("tensor", "tensor", TENSOR),
    ("128", "128x128", BLOCK),
    ("rows", "tensor", ROW),
    ("tensor", "rows", ROW),
    ("rows", "rows", ROW),
    ("32", "32", MX),
    ("128", "1x128", ROW_BLOCK),
)
# Beside activations without scales. Where [1, N] could be blocks too, it is read as those, as checkpoints have it.
_OF_WEIGHTS = (("128x128", BLOCK), ("tensor", TENSOR), ("rows", ROW), ("1x128", ROW_BLOCK))


def scaling_of_form(
    a_dtype: torch.dtype | None, a_rank: int, a_last: int, b_dtype: torch.dtype, b_shape: Sequence[int], n: int, k: int
) -> str | None:
    """The scaling that scales of these dtypes and shapes mean; None if there is none.

    Args:
        a_dtype, a_rank, a_last: of a_scale: dtype, dimensions, size of the last of two; of one dimension, whether it is
            1. The number of rows is not looked at. None where the activations are not quantised.
        b_dtype, b_shape: of b_scale.
        n, k: shape of b.
    """
    of_b = _kinds_of_b(b_dtype, b_shape, n, k)
    if a_dtype is None:
        return next((scaling for b, scaling in _OF_WEIGHTS if b in of_b), None)
    of_a = _kinds_of_a(a_dtype, a_rank, a_last, k)
    for a, b, scaling in _PAIRS:
        if a in of_a and b in of_b:
            return scaling
    return None


def fits_b(dtype: torch.dtype, shape: Sequence[int], n: int, k: int) -> bool:
    """Whether scales of this dtype and shape mean anything for b."""
    return bool(_kinds_of_b(dtype, shape, n, k))


def remedy(parameter: str, scale: Tensor, rows: int, k: int) -> str | None:
    """What to give in place of a scale in another library's layout, for a matrix [rows, k]; None for other scales.

    A transposed scale is rejected even if its shape shows it: at as many rows as there are blocks of columns
    it would be read as one that does not, and the same caller would get wrong numbers.
    """
    wide = blocks(k, 128)
    if scale.dtype is torch.int32:
        return (
            f"DeepGEMM's four exponents in an int32: give them before they are packed, float8_e8m0fnu [{rows}, {wide}]"
        )
    high = (rows, blocks(rows, 128)) if parameter == "b_scale" else (rows,)
    if scale.dtype in _SCALE_TYPES and scale.ndim == 2 and tuple(scale.shape) in [(wide, size) for size in high]:
        return f"it is transposed (MN-major): give the view {parameter}.t(), {[scale.shape[1], wide]}"
    return None


def of_rows(a: Tensor, a_scale: Any) -> Any:
    """a_scale with a row for each of a, of one for 128 rows; or as [1] the [1, 1] that scales a whole a of several.

    Anything else is given back as it is.
    """
    if not isinstance(a_scale, Tensor) or a_scale.ndim != 2 or a_scale.shape[0] == a.shape[0]:
        return a_scale
    if a_scale.shape == (1, 1):
        return a_scale.reshape(1)
    if a.ndim == 2 and a_scale.dtype in _SCALE_TYPES and a_scale.shape == tuple(blocks(size, 128) for size in a.shape):
        raw = a_scale.view(torch.uint8) if a_scale.itemsize == 1 else a_scale
        return raw.repeat_interleave(128, 0)[: a.shape[0]].view(a_scale.dtype)
    return a_scale


def by_rows(b_scale: Tensor, scaling: str) -> Tensor:
    """b_scale, or as [N] the [1, N] that scales rows of b, as operators have it that take b transposed."""
    if scaling in (ROW, TENSOR) and b_scale.ndim == 2 and b_scale.shape[0] == 1:
        return b_scale.reshape(-1)
    return b_scale


def dequantised(matrix: Tensor, scale: Tensor, scaling: str, row_block: int, dtype: torch.dtype) -> Tensor:
    """A matrix with its scales multiplied in, computed in `dtype`.

    Args:
        matrix: codes [rows, columns].
        scale: in any form that `scaling` means.
        scaling: of the product.
        row_block: rows that share a scale of blocks: 128 of b, scaled by block, else 1.
        dtype: float32 or float64.
    """
    values = matrix.to(dtype)
    if scaling == TENSOR or (scaling == ROW and scale.ndim < 2 and scale.numel() == 1):
        return values * values_of(scale).to(dtype)
    columns = GROUP.get(scaling, matrix.shape[1])
    return values * expand(scale, matrix.shape[0], matrix.shape[1], row_block, columns).to(dtype)


def blocks(size: int, width: int) -> int:
    """ceil(size / width)."""
    return -(-size // width)


def expand(scale: Tensor, rows: int, columns: int, row_block: int, column_block: int) -> Tensor:
    """Scales, of any form but per tensor, as one float32 number per element of a matrix [rows, columns]."""
    values = values_of(scale)
    values = values.unsqueeze(1) if scale.ndim == 1 else values
    if row_block > 1:
        values = values.repeat_interleave(row_block, 0)[:rows]
    if column_block < columns:
        values = values.repeat_interleave(column_block, 1)[:, :columns]
    return values.expand(rows, columns)


def values_of(scale: Tensor) -> Tensor:
    """Scales as float32, exactly."""
    return scale if scale.dtype is torch.float32 else from_e8m0(scale)


def _kinds_of_a(dtype: torch.dtype, rank: int, last: int, k: int) -> list[str]:
    kinds: list[str] = []
    if dtype not in _SCALE_TYPES or rank > 2:
        return kinds
    if dtype is torch.float32:
        if rank == 0 or (rank == 1 and last == 1):
            kinds.append("tensor")
        if rank == 1 or (rank == 2 and last == 1):
            kinds.append("rows")
    if rank == 2:
        if last == -(-k // 128):
            kinds.append("128")
        if last == -(-k // 32) and dtype is not torch.float32:
            kinds.append("32")
    return kinds


def _kinds_of_b(dtype: torch.dtype, shape: Sequence[int], n: int, k: int) -> list[str]:
    kinds: list[str] = []
    rank = len(shape)
    if dtype not in _SCALE_TYPES or rank > 2:
        return kinds
    of_floats = dtype is torch.float32
    if rank < 2:
        size = shape[0] if rank else 1
        if of_floats and size == 1:
            kinds.append("tensor")
        if of_floats and rank and size == n:
            kinds.append("rows")
        return kinds
    rows, columns = shape
    if of_floats:
        if rows == columns == 1:
            kinds.append("tensor")
        if (rows == n and columns == 1) or (rows == 1 and columns == n):
            kinds.append("rows")
    if columns == -(-k // 128):
        if rows == -(-n // 128):
            kinds.append("128x128")
        if rows == n:
            kinds.append("1x128")
    if not of_floats and rows == n and columns == -(-k // 32):
        kinds.append("32")
    return kinds
