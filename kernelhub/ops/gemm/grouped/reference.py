"""`grouped_gemm` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops import formats
from kernelhub.ops.gemm.grouped.problem import BLOCK, BLOCKS, FP4_BLOCK
from kernelhub.ops.gemm.grouped.scales import E8M0_DTYPES, geometry_of_b


def grouped_gemm_reference(
    a: Tensor,
    b: Tensor,
    *,
    offsets: Tensor | None = None,
    group_sizes: Tensor | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    b_global_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The op, computed in `dtype` and returned in it; `out` and `out_dtype` are ignored. Rows of no group are NaN."""
    geometry = geometry_of_b(b_scale, b)
    rows = rows_dequantized(a, a_scale, geometry in BLOCKS, dtype)
    result = rows.new_full((*a.shape[:-1], b.shape[1]), torch.nan)
    for group, span in enumerate(spans(a, offsets, group_sizes)):
        weights = weights_dequantized(b[group], of_group(b_scale, group, b.shape[0]), geometry, dtype)
        if b_global_scale is not None:
            weights = weights * b_global_scale.reshape(-1)[group if b_global_scale.numel() > 1 else 0]
        product = rows[span] @ weights.T
        result[span] = product if bias is None else product + bias[group].to(dtype)
    return result


def spans(a: Tensor, offsets: Tensor | None, group_sizes: Tensor | None) -> list[tuple[int | slice, ...]]:
    """Where the rows of each group lie in a."""
    if group_sizes is not None:
        return [(group, slice(0, size)) for group, size in enumerate(group_sizes.tolist())]
    assert offsets is not None
    ends = offsets.tolist()
    return [(slice(start, end),) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def of_group(scale: Tensor | None, group: int, num_groups: int) -> Tensor | None:
    """The scale of one group, where there is one for each."""
    if scale is None or scale.ndim == 0 or (scale.ndim == 1 and scale.shape[0] != num_groups):
        return scale
    return scale[group]


def rows_dequantized(a: Tensor, scale: Tensor | None, grouped: bool, dtype: torch.dtype) -> Tensor:
    """a [..., K] times its scales."""
    values = a.to(dtype)
    if scale is None:
        return values
    factor = _floats(scale).to(dtype)
    if grouped:
        return values * factor.repeat_interleave(BLOCK, -1)[..., : a.shape[-1]]
    if factor.numel() == 1:
        return values * factor.reshape(())
    return values * (factor if factor.ndim == a.ndim else factor.unsqueeze(-1))


def weights_dequantized(b: Tensor, scale: Tensor | None, geometry: str | None, dtype: torch.dtype) -> Tensor:
    """The weights of one group, [N, K], from b [N, K], or [N, K / 2] in fp4, and the group's own scales."""
    if scale is None or geometry is None:
        return b.to(dtype)
    if geometry in FP4_BLOCK:
        values = formats.from_e2m1(b, dtype)
        factor = scale.to(dtype) if geometry == "nvfp4" else formats.from_e8m0(scale).to(dtype)
        return values * factor.repeat_interleave(FP4_BLOCK[geometry], 1)[:, : values.shape[1]]
    factor = _floats(scale).to(dtype)
    if geometry in BLOCKS:
        rows = factor.repeat_interleave(BLOCK, 0)[: b.shape[0]]
        return b.to(dtype) * rows.repeat_interleave(BLOCK, 1)[:, : b.shape[1]]
    return b.to(dtype) * (factor.reshape(-1, 1) if geometry == "channel" else factor.reshape(()))


def _floats(scale: Tensor) -> Tensor:
    return formats.from_e8m0(scale) if scale.dtype in E8M0_DTYPES else scale
