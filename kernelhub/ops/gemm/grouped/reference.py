"""`grouped_gemm` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops import formats
from kernelhub.ops.gemm.grouped.problem import BLOCK, BLOCKS, GROUPS, SMALL, SPAN
from kernelhub.ops.gemm.grouped.scales import E8M0_DTYPES, PACKED, geometry_of_a, geometry_of_b
from kernelhub.ops.precision import at_own_precision


@at_own_precision
def grouped_gemm_reference(
    a: Tensor,
    b: Tensor,
    *,
    offsets: Tensor | None = None,
    group_sizes: Tensor | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    a_global_scale: Tensor | None = None,
    b_global_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The op, computed in `dtype` and returned in it; `out` and `out_dtype` are ignored. Rows of no group are NaN."""
    geometry = geometry_of_b(b_scale, b)
    rows = rows_dequantized(a, a_scale, geometry_of_a(a_scale, geometry, a), dtype)
    result = rows.new_full((*a.shape[:-1], b.shape[1]), torch.nan)
    for group, span in enumerate(spans(a, offsets, group_sizes)):
        weights = weights_dequantized(b[group], of_group(b_scale, group, b.shape[0]), geometry, dtype)
        product = rows[span] @ weights.T
        for factor in (a_global_scale, b_global_scale):
            if factor is not None:
                product = product * factor.reshape(-1)[group if factor.numel() > 1 else 0].to(dtype)
        result[span] = product if bias is None else product + bias[group].to(dtype)
    return result


def spans(a: Tensor, offsets: Tensor | None, group_sizes: Tensor | None) -> list[tuple[int | slice, ...]]:
    """The range of rows of each group in a."""
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


def rows_dequantized(a: Tensor, scale: Tensor | None, geometry: str | None, dtype: torch.dtype) -> Tensor:
    """a, [..., K] or [..., K / 2] in fp4, times its scales, but for a global one."""
    values = _values(a, dtype)
    if scale is None or geometry is None:
        return values
    if geometry in SMALL or geometry in GROUPS:
        return _times(values, scale, SPAN.get(geometry, BLOCK))
    factor = scale.to(dtype)
    if factor.numel() == 1:
        return values * factor.reshape(())
    return values * (factor if factor.ndim == a.ndim else factor.unsqueeze(-1))


def weights_dequantized(b: Tensor, scale: Tensor | None, geometry: str | None, dtype: torch.dtype) -> Tensor:
    """The weights of one group, [N, K], from b [N, K], or [N, K / 2] in fp4, and the group's own scales."""
    values = _values(b, dtype)
    if scale is None or geometry is None:
        return values
    if geometry in SMALL:
        return _times(values, scale, SPAN[geometry])
    if geometry in BLOCKS:
        return _times(values, _floats(scale).repeat_interleave(BLOCK, 0)[: b.shape[0]], BLOCK)
    factor = scale.to(dtype)
    return values * (factor.reshape(-1, 1) if geometry == "channel" else factor.reshape(()))


def _values(operand: Tensor, dtype: torch.dtype) -> Tensor:
    return formats.from_e2m1(operand, dtype) if operand.dtype in PACKED else operand.to(dtype)


def _times(values: Tensor, scale: Tensor, span: int) -> Tensor:
    """values [..., K] times scale [..., ceil(K / span)]."""
    factor = _floats(scale).to(values.dtype)
    return values * factor.repeat_interleave(span, -1)[..., : values.shape[-1]]


def _floats(scale: Tensor) -> Tensor:
    return formats.from_e8m0(scale) if scale.dtype in E8M0_DTYPES else scale.float()
