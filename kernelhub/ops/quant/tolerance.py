"""How far a round trip through a format may be from what went in, and why.

Rounding x / s to the nearest code is off by half the distance of neighbouring codes, times s. The distance is at most

* e4m3: 2^-3 of the value's power of two, and never less than 2^-9: half of it is at most |x| / 16, or s 2^-10;
* e2m1: 2^-1 of the value's power of two, and never less than 2^-1: half of it is at most |x| / 4, or s / 4;

plus what saturates: where amax / s exceeds the largest code c, |x| - c s. Division, product and the rounding of the
result add 2^-22 and the unit roundoff of its dtype, relative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.formats import E2M1_MAX, E4M3_MAX

UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def round_trip_error_allowed(x: Tensor, scale: Tensor, fp4: bool, dtype: torch.dtype) -> Tensor:
    """The allowed error of each element, in float64; `scale` is the factor of its code."""
    size, scale = x.double().abs(), scale.double()
    relative, least, largest = (2.0**-2, 2.0**-2, E2M1_MAX) if fp4 else (2.0**-4, 2.0**-10, E4M3_MAX)
    saturated = (size - largest * scale).clamp(min=0.0)
    half = torch.maximum(relative * torch.minimum(size, largest * scale), least * scale)
    return half + saturated + (UNIT_ROUNDOFF[dtype] + 2.0**-22) * size + torch.finfo(dtype).smallest_normal * 2.0**-7
