"""`bmm_fp8` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.precision import at_own_precision


@at_own_precision
def bmm_fp8_reference(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The op, computed in `dtype` and returned in it; arguments as of the op, the destination ignored."""
    left, right = (
        matrix.to(dtype) * scale.to(dtype).reshape(-1, 1, 1) for matrix, scale in ((a, a_scale), (b, b_scale))
    )
    return left @ right.transpose(1, 2)
