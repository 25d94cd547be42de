"""The meaning of Marlin's scales, and the numbers that they represent.

**NVFP4.** A byte has five bits of exponent, four below the top one, and three of mantissa, no sign. For float16 it is
the upper byte of a float16 without its sign: all numbers of e4m3 that are not negative, times 2^7, are among them. For
bfloat16 the kernel puts the top bit to the top of bfloat16's exponent and the other four to its bottom, which gives
the same numbers as long as the top bit is set: those from 2 to 1.875 * 2^16, 16 powers of two, while e4m3 has 18 with
its subnormals. So scales are first multiplied by the power of two that brings the largest to the top. Codes are
taken as 2^-14 (float16) or 2^-126 (bfloat16) of themselves; all that is left of these powers goes into the
global scale, a factor of the float32 sums.

**MXFP4.** A byte is the exponent of a bfloat16: 0 is zero, not 2^-127; 255 infinite, not NaN. The kernel multiplies
code by scale in bfloat16: from 2 to 252 every product is a normal bfloat16.

A group whose codes are all zero gives zero by any finite scale. These facts were read in the machine code of vLLM
0.33.0 and of its sources.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BFLOAT16_RANGE = (16, 31)  # of exponents of scales, as they are in their bytes
CODES_EXPONENT = {"float16": 14, "bfloat16": 126}
MXFP4_RANGE = (2, 252)
_E4M3_NAN = 0x7F


class Unfit(Exception):
    """Raised for numbers that Marlin's format cannot represent; the message names them and the reason."""


def _e5m3(byte: int) -> int:
    """A byte of e4m3 that is not negative, times 2^7, as exponent and mantissa of a float16."""
    exponent, mantissa = byte >> 3, byte & 7
    if exponent:
        return ((exponent + 15) << 3) | mantissa
    if not mantissa:
        return 0
    up = 3 - mantissa.bit_length() + 1
    return ((16 - up) << 3) | (mantissa << up & 7)


_OF_E4M3 = [_e5m3(byte) for byte in range(_E4M3_NAN)]
_TO_E4M3 = {value: byte for byte, value in enumerate(_OF_E4M3)}


def nvfp4_scales(scale: Tensor, used: Tensor, dtype: str) -> tuple[Tensor, int]:
    """Scales of e4m3 as bytes of Marlin's format, and the power of two that multiplies them beyond 2^7.

    Args:
        scale: float8_e4m3fn.
        used: of the same shape, whether the group has a code other than zero.
        dtype: of the activations.

    Raises:
        Unfit: a scale is negative or NaN, or the format does not hold the smallest beside the largest.
    """
    raw = scale.view(torch.uint8)
    if bool((raw >= _E4M3_NAN).any()):
        raise Unfit("has scales that are negative or NaN, and Marlin ignores their sign")
    table = torch.tensor(_OF_E4M3, dtype=torch.uint8, device=raw.device)
    made = table[raw.int()]
    shift = 0
    if dtype == "bfloat16":
        low, high = BFLOAT16_RANGE
        shift = high - (int(made.max()) >> 3)
        made = torch.where(made == 0, made, made + 8 * shift)
        small = (made < 8 * low) & (made != 0) & used
        if bool(small.any()):
            raise Unfit(
                "holds scales over 2^15 times larger than others of groups that are not zero, and Marlin's scales for "
                f"bfloat16 have 16 powers of two: {int(small.sum())} would be multiplied as zero"
            )
    return made, shift


def e4m3_scales(made: Tensor, shift: int) -> Tensor:
    """The inverse of `nvfp4_scales`."""
    back = torch.zeros(256, dtype=torch.uint8, device=made.device)
    for value, byte in _TO_E4M3.items():
        if 0 < value < 256 - 8 * shift:
            back[value + 8 * shift] = byte
    return back[made.int()].view(torch.float8_e4m3fn)


def exponent_left(dtype: str, shift: int) -> int:
    """The power of two that multiplies sums of NVFP4."""
    return CODES_EXPONENT[dtype] - 7 - shift


def check_global_scale(value: float, exponent: int) -> None:
    """That a global scale times 2^exponent is the same number with another exponent.

    Raises:
        Unfit: it is not.
    """
    left = math.ldexp(value, exponent) if math.isfinite(value) else value
    if not math.isfinite(left) or abs(left) > torch.finfo(torch.float32).max:
        raise Unfit(f"is {value:g}, and Marlin multiplies it by 2^{exponent}, which exceeds float32")


def check_mxfp4_scales(raw: Tensor, used: Tensor) -> None:
    """That every product of a code by its scale is a normal bfloat16.

    Args:
        raw: bytes of float8_e8m0fnu.
        used: of the same shape, whether the group has a code other than zero.

    Raises:
        Unfit: one is not.
    """
    low, high = MXFP4_RANGE
    if bool((raw == 255).any()):
        raise Unfit("has NaN scales, which Marlin reads as infinite")
    if bool((((raw < low) | (raw > high)) & used).any()):
        raise Unfit(
            f"has scales outside 2^{low - 127} to 2^{high - 127}, whose products with codes are not normal in bfloat16"
        )
