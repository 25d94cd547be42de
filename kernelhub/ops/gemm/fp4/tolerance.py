"""How far a product may be from the exact one, and why.

Every a_k b_k is exact in float32: codes with their groups' scales have at most 8 bits of mantissa each (float16: 11 and
7). Kernels add them up in float32; K additions, each rounded to nearest, in any order, are off by at most K 2^-24 S,
where S is the sum of |a_k b_k|. Tensor cores add eight products or more at once and may cut off what is 2^-22 below
the largest: K / 8 steps of 2^-22 S, half of that. Scales of rows and tensors, the bias and the partial sums of a split
K add at most eight more roundings of 2^-24, and the result is rounded once to its dtype, relative u.

Elements of mxfp4 and mxfp8 may be beyond float32 (6 and 448 x 2^127); kernels multiply them over a power of two, 2^3
and 2^8 or 2^9, that is put back at the end. So no result is NaN whose terms are numbers of float32, as long as S is
below 2^128; from there on sums of terms of both signs may be infinite or NaN, those of one sign are infinite. In
bfloat16 elements of mxfp8 below 2^-122 are rounded to multiples of 2^-125.
"""

from __future__ import annotations

import torch
from torch import Tensor

_UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def error_allowed(want: Tensor, sum_of_sizes: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """The allowed error of each element, in float64, for the exact result and the sum of its products' magnitudes."""
    accumulated = (k + 8) * 2.0**-24 * sum_of_sizes.double()
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return accumulated + _UNIT_ROUNDOFF[dtype] * (want.double().abs() + accumulated) + smallest
