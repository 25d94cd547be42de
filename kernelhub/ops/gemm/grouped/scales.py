"""Which geometry a scale has: told from its shape and dtype, and held against what it is for.

A geometry is told so that equal configurations have equal ones at any number of rows. Where two geometries cannot be
told apart, as ``[M, 1]`` for K up to 128, they mean the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.gemm.grouped.problem import BLOCK, BLOCKS, FP4_BLOCK, GROUPS

E8M0_DTYPES = (torch.float8_e8m0fnu, torch.uint8)


def geometry_of_b(scale: Tensor | None, b: Tensor) -> str | None:
    """One of `B_SCALES`, or None without a scale."""
    if scale is None:
        return None
    if b.element_size() == 1 and b.dtype is not torch.float8_e4m3fn:
        return "nvfp4" if scale.dtype is torch.float8_e4m3fn else "mxfp4"
    if scale.ndim < 2:
        return "tensor"
    if scale.dtype in E8M0_DTYPES:
        return "block_e8m0"
    rows = scale.shape[1]
    return "channel" if scale.ndim == 2 or (rows == b.shape[1] and scale.shape[2] == 1) else "block"


def geometry_of_a(scale: Tensor | None, geometry_of_b: str | None) -> str | None:
    """One of `A_SCALES`, or None without a scale."""
    if scale is None:
        return None
    if geometry_of_b in BLOCKS:
        return "group_e8m0" if scale.dtype in E8M0_DTYPES else "group"
    return "tensor" if scale.ndim == 0 or (scale.ndim == 1 and scale.shape[0] == 1) else "token"


def shapes_of_a(geometry: str, rows: tuple[int, ...], k: int) -> tuple[tuple[int, ...], ...]:
    """The shapes that scales of a may have; `rows` is (M,) or (G, M_max)."""
    if geometry == "tensor":
        return ((), (1,))
    if geometry in GROUPS:
        return ((*rows, -(-k // BLOCK)),)
    return ((*rows, 1), rows)


def shapes_of_b(geometry: str, groups: int, n: int, k: int) -> tuple[tuple[int, ...], ...]:
    """The shapes that scales of b may have."""
    if geometry == "tensor":
        return ((groups,), (), (1,))
    if geometry == "channel":
        return ((groups, n), (groups, n, 1))
    if geometry in BLOCKS:
        return ((groups, -(-n // BLOCK), -(-k // BLOCK)),)
    return ((groups, n, -(-k // FP4_BLOCK[geometry])),)


def dtypes_of(geometry: str) -> tuple[torch.dtype, ...]:
    """The dtypes that scales of a geometry may have."""
    if geometry == "nvfp4":
        return (torch.float8_e4m3fn,)
    return E8M0_DTYPES if geometry in ("group_e8m0", "block_e8m0", "mxfp4") else (torch.float32,)
