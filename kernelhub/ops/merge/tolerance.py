"""How far a merge may be from the reference, and why.

The result is a mean of the parts with weights that sum to one. Weights are float32 exponentials, whose relative
error for |lse| up to 2^5 is below 2^-18; the result is rounded to its dtype once, relative u, the unit roundoff
(2^-8 for bfloat16, 2^-11 for float16, 2^-24 for float32). So

* no element is off by more than (u + 2^-17) max |outs|;
* the LSE, a float32 log of a float32 sum, by no more than 2^-17 and 2^-21 of its size;
* a result in float8_e4m3fn, a merged result divided by a scale s and rounded once, by no more than half a step of the
  format, 2^-4 of an element's size and 2^-10 at least, and 2^-17 max |outs| / s before that.
"""

from __future__ import annotations

import torch
from torch import Tensor

_UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def largest_error_allowed(dtype: torch.dtype, largest_value: float) -> float:
    """The allowed error of any element of the result, for parts of which none is larger than `largest_value`."""
    return (_UNIT_ROUNDOFF[dtype] + 2.0**-17) * largest_value


def quantized_error_allowed(want: Tensor, largest_value: float, scale: float) -> Tensor:
    """The allowed error of each element of a float8_e4m3fn result, for parts as above and this scale."""
    before = 2.0**-17 * largest_value / abs(scale)
    return torch.clamp((want.abs() + before) * 2.0**-4, min=2.0**-10) + before


def lse_error_allowed(lse: Tensor) -> Tensor:
    """The allowed error of each element of the merged LSE."""
    return 2.0**-17 + 2.0**-21 * lse.abs().nan_to_num(posinf=0.0)
