"""`fp4_gemm` in plain torch: formats derived from dtypes, dequantised, multiplied."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.formats import E4M3, E8M0, from_e2m1, from_e8m0
from kernelhub.ops.gemm.fp4.problem import FP8, GROUP, MXFP4, MXFP8, NVFP4
from kernelhub.ops.packed import PackedWeight
from kernelhub.ops.precision import at_own_precision

BYTES = (torch.uint8, torch.float4_e2m1fn_x2)
EXPONENTS = (E8M0, torch.uint8)
_HALVES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def a_format_of(a: Tensor, a_scale: Tensor | None) -> str:
    """Format of a; empty if there is none such."""
    dtype = a.dtype
    half = _HALVES.get(dtype)
    if half is not None:
        return half if a_scale is None else ""
    if a_scale is None:
        return ""
    if dtype is E4M3:
        return FP8 if a_scale.dtype is torch.float32 else MXFP8 if a_scale.dtype in EXPONENTS else ""
    return fp4_format_of(a_scale) if dtype in BYTES else ""


def fp4_format_of(scale: Tensor | None) -> str:
    """Format of float4 with such scales; empty if there is none such."""
    if scale is None:
        return ""
    return NVFP4 if scale.dtype is E4M3 else MXFP4 if scale.dtype in EXPONENTS else ""


def values(codes: Tensor, scale: Tensor | None, global_scale: Tensor | None, form: str, dtype: torch.dtype) -> Tensor:
    """[rows, K] of an operand with everything multiplied, exactly but for the global scale."""
    if scale is None:
        return codes.to(dtype)
    plain = from_e2m1(codes).to(dtype) if form.endswith("fp4") else codes.to(dtype)
    if form == FP8:
        return plain * scale.reshape(-1, 1).to(dtype)
    factor = (scale.float() if form == NVFP4 else from_e8m0(scale)).to(dtype)
    plain = plain * factor.repeat_interleave(GROUP[form], -1)
    return plain if global_scale is None else plain * global_scale.reshape(()).to(dtype)


@at_own_precision
def fp4_gemm_reference(
    a: Tensor,
    b: Tensor | PackedWeight,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    a_global_scale: Tensor | None = None,
    b_global_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The op, computed in `dtype` and returned in it; other arguments as of the op, `out` and `out_dtype` ignored."""
    weight: Tensor | None
    if isinstance(b, PackedWeight):
        weight, b_scale, b_global_scale = b.unpack()
    else:
        weight = b
    assert weight is not None
    assert b_scale is not None
    rows = a.reshape(-1, a.shape[-1])
    own = None if a_scale is None else a_scale
    if own is not None and own.dtype is not torch.float32:
        own = own.reshape(-1, own.shape[-1])
    left = values(rows, own, a_global_scale, a_format_of(a, a_scale), dtype)
    right = values(weight, b_scale, b_global_scale, fp4_format_of(b_scale), dtype)
    result = left @ right.t()
    if bias is not None:
        result = result + bias.to(dtype)
    return result.view(*a.shape[:-1], weight.shape[0])
