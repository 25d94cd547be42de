"""How far a sum over ranks, and a norm of it, may be from the reference, and why.

A sum of n addends that is rounded to a dtype of unit roundoff u after each addition, in any order, is off by at most
n u times the sum of the addends' absolute values (u is 2^-8 for bfloat16, 2^-11 for float16, 2^-24 for float32). A
kernel that adds in float32 rounds once, which is less.

A norm r s w with s = 1 / sqrt(mean(r^2) + eps) of such a sum r, off by e at most in any element of a row, is off by

* s |w| e for the element itself;
* |r s w| times the relative error of s. That of the mean of squares is at most 2 e rms / (rms^2 + eps) + (e / rms)^2,
  half of which goes into s; the float32 arithmetic of a row adds 2^-20;
* u of its size for the rounding of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def sum_error_allowed(addends: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The allowed error of each element of a sum.

    Args:
        addends: float64, of one shape: what each rank gives, and the residual.
        dtype: of the sum, and of every sum on the way.
    """
    size = torch.stack([addend.abs() for addend in addends]).sum(0)
    return len(addends) * (_UNIT_ROUNDOFF[dtype] + 2.0**-24) * size + torch.finfo(dtype).smallest_normal


def normalised_error_allowed(
    want: Tensor, total: Tensor, weight: Tensor, eps: float, error: Tensor, dtype: torch.dtype
) -> Tensor:
    """The allowed error of each element of a norm.

    Args:
        want: float64 ``[..., hidden_size]``, the norm.
        total: float64, what is normalised.
        weight: float64 ``[hidden_size]``.
        eps: as of the op.
        error: the allowed error of `total`.
        dtype: of the result.
    """
    square = total.square().mean(-1, keepdim=True) + eps
    scale = square.clamp_min(torch.finfo(torch.float64).tiny).rsqrt()
    off = error.square().mean(-1, keepdim=True).sqrt()
    relative = off * scale + 0.5 * (off * scale).square() + 2.0**-20
    return (scale * error * weight.abs() + want.abs() * (relative + _UNIT_ROUNDOFF[dtype])) * 1.01 + torch.finfo(
        dtype
    ).smallest_normal
