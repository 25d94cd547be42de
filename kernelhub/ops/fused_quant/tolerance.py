"""How far results may be from the reference, and why.

A row y is computed in float32: a sum of squares of up to 2^15 elements, of which a thread adds up fewer than 2^7, an
inverse root, exponentials and a few products. Each is off by less than 2^-19, relative, and y by less than 2^-17 |y|.
Then

* floats are rounded once: u |y| more, u the unit roundoff, and half the least number of the dtype;
* a scale is between those of largest magnitudes (1 - 2^-17) amax and (1 + 2^-17) amax, to the bit;
* a code times its scale is as far from y as `kernelhub.ops.quant.tolerance` allows of a code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.quant.tolerance import UNIT_ROUNDOFF, round_trip_error_allowed

COMPUTED = 2.0**-17


def floats_allowed(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The allowed error of each element of an unquantised result, in float64."""
    size = y.double().abs()
    return (UNIT_ROUNDOFF[dtype] + COMPUTED) * size + torch.finfo(dtype).smallest_normal * UNIT_ROUNDOFF[dtype]


def codes_allowed(y: Tensor, factor: Tensor, fp4: bool) -> Tensor:
    """The same of code times scale; `factor` is the scale of each element."""
    return round_trip_error_allowed(y, factor, fp4, torch.float32) + COMPUTED * y.double().abs()
