"""`fp8_gemm` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.gemm.fp8.checks import form_of_a
from kernelhub.ops.gemm.fp8.problem import BLOCK
from kernelhub.ops.gemm.fp8.scaling import by_rows, dequantised, of_rows, scaling_of_form
from kernelhub.ops.packed import PackedWeight
from kernelhub.ops.precision import at_own_precision


@at_own_precision
def fp8_gemm_reference(
    a: Tensor,
    b: Tensor | PackedWeight,
    a_scale: Tensor | None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The op, computed in `dtype` and returned in it; arguments as of the op, the destination ignored."""
    weight: Tensor | None
    if isinstance(b, PackedWeight):
        weight, b_scale = b.unpack()
    else:
        weight = b
    assert weight is not None
    assert b_scale is not None
    a_scale = of_rows(a, a_scale)
    scaling = str(scaling_of_form(*form_of_a(a_scale), b_scale.dtype, b_scale.shape, *weight.shape))
    b_scale = by_rows(b_scale, scaling)
    left = a.to(dtype) if a_scale is None else dequantised(a, a_scale, scaling, 1, dtype)
    right = dequantised(weight, b_scale, scaling, 128 if scaling == BLOCK else 1, dtype)
    product = left @ right.t()
    return product if bias is None else product + bias.to(dtype)
