"""The geometry of a scale: derived from its shape and dtype, and checked against its operand.

Equal configurations have equal geometries at any number of rows. Where two geometries have the same shape, as
``[M, 1]`` for K up to 128, they mean the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.gemm.grouped.problem import BLOCK, BLOCKS, GROUPS, SMALL, SPAN

E8M0_DTYPES = (torch.float8_e8m0fnu, torch.uint8)
PACKED = (torch.uint8, torch.float4_e2m1fn_x2)  # two fp4 values a byte


def columns_of(operand: Tensor) -> int:
    """K of rows or weights."""
    return operand.shape[-1] * (2 if operand.dtype in PACKED else 1)


def geometry_of_b(scale: Tensor | None, b: Tensor) -> str | None:
    """One of `B_SCALES`, or None without a scale."""
    if scale is None:
        return None
    if b.element_size() == 1 and b.dtype is not torch.float8_e4m3fn:
        return _of_fp4(scale)
    if scale.ndim < 2:
        return "tensor"
    rows = scale.shape[1]
    if scale.dtype in E8M0_DTYPES:
        # A row of the weights, or a block of 128 of them: with one row columns decide, and up to 32 they mean the same.
        k = b.shape[-1]
        each = rows == b.shape[1] and scale.ndim == 3 and (rows > 1 or scale.shape[2] > -(-k // BLOCK))
        return "mxfp8" if each else "block_e8m0"
    if rows == 1 and b.shape[1] != 1 and _of_group(scale, b):
        return "tensor"
    return "channel" if scale.ndim == 2 or (rows == b.shape[1] and scale.shape[2] == 1) else "block"


def _of_group(scale: Tensor, b: Tensor) -> bool:
    """Whether [G, 1] or [G, 1, 1] is one number for a group. That of a single block means the same, as a block."""
    return scale.ndim == 2 or (scale.shape[2] == 1 and max(b.shape[1:]) > BLOCK)


def _of_fp4(scale: Tensor) -> str:
    return "nvfp4" if scale.dtype is torch.float8_e4m3fn else "mxfp4"


def geometry_of_a(scale: Tensor | None, geometry_of_b: str | None, a: Tensor) -> str | None:
    """One of `A_SCALES`, or None without a scale."""
    if scale is None:
        return None
    if geometry_of_b in BLOCKS:
        return "group_e8m0" if scale.dtype in E8M0_DTYPES else "group"
    if geometry_of_b in SMALL:
        return _of_fp4(scale) if a.dtype in PACKED else "mxfp8"
    if scale.numel() != 1:
        return "token"
    return "tensor" if scale.ndim < 2 or a.numel() != a.shape[-1] else "token"  # of one row, [1, 1] means either


def shapes_of_a(geometry: str, rows: tuple[int, ...], k: int) -> tuple[tuple[int, ...], ...]:
    """The shapes that scales of a may have; `rows` is (M,) or (G, M_max)."""
    if geometry == "tensor":
        return ((), (1,), (1, 1))
    if geometry in GROUPS:
        return ((*rows, -(-k // BLOCK)),)
    if geometry in SMALL:
        return ((*rows, -(-k // SPAN[geometry])),)
    return ((*rows, 1), rows)


def shapes_of_b(geometry: str, groups: int, n: int, k: int) -> tuple[tuple[int, ...], ...]:
    """The shapes that scales of b may have."""
    if geometry == "tensor":
        return (*per_group(groups), (groups, 1), (groups, 1, 1))
    if geometry == "channel":
        return ((groups, n), (groups, n, 1))
    if geometry in BLOCKS:
        return ((groups, -(-n // BLOCK), -(-k // BLOCK)),)
    return ((groups, n, -(-k // SPAN[geometry])),)


def per_group(groups: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of one factor for each group, or one for all."""
    return (groups,), (), (1,)


def remedy(parameter: str, scale: Tensor, shape: tuple[int, ...]) -> str | None:
    """What to give in place of a scale of blocks in the layout of another library; None for any other scale.

    A transposed scale is rejected even if its shape shows it: at as many rows as there are blocks of columns it
    would be read as one that does not.
    """
    if scale.dtype is torch.int32:
        return f"DeepGEMM's four exponents in an int32: give them before they are packed, float8_e8m0fnu {list(shape)}"
    if scale.ndim == len(shape) > 1 and tuple(scale.shape) == (*shape[:-2], shape[-1], shape[-2]):
        return f"it is transposed (MN-major): give the view {parameter}.mT, {list(shape)}"
    return None


def dtypes_of(geometry: str) -> tuple[torch.dtype, ...]:
    """The dtypes that scales of a geometry may have."""
    if geometry == "nvfp4":
        return (torch.float8_e4m3fn,)
    return E8M0_DTYPES if geometry.endswith("e8m0") or geometry in SMALL else (torch.float32,)
