"""The number formats of quantised tensors in plain torch: exact decoding, saturating encoding, on every torch.

========  ==================  ===========================================================
format    stored as           values
========  ==================  ===========================================================
e4m3      float8_e4m3fn       up to 448, NaN, no infinity
e5m2      float8_e5m2         up to 57344, NaN, infinity: the upper half of a float16
e2m1      uint8, two a byte   0, 0.5, 1, 1.5, 2, 3, 4, 6 and negatives; the first of two
                              in the low four bits
e8m0      float8_e8m0fnu      2^(byte - 127), 255 is NaN; no sign
int4      uint8, two a byte   -8 to 7, two's complement; the first of two in the low
                              four bits
========  ==================  ===========================================================

Source: OCP Microscaling Formats 1.0; FP8 Formats for Deep Learning (Micikevicius et al. 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E5M2_MAX = 57344.0
E2M1_MAX = 6.0
INT4_MAX = 7.0  # -8 is there, too
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
E8M0 = torch.float8_e8m0fnu

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_TIES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def to_e4m3(x: Tensor) -> Tensor:
    """Any floats as float8_e4m3fn, rounded to nearest even; infinity becomes 448, NaN stays.

    The conversion of torch up to 2.11 turns values above 464 into NaN.
    """
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def to_e5m2(x: Tensor) -> Tensor:
    """Any floats as float8_e5m2, rounded to nearest even; infinity becomes 57344, NaN stays."""
    return x.float().clamp(-E5M2_MAX, E5M2_MAX).to(E5M2)


def to_e2m1(x: Tensor) -> Tensor:
    """Floats ``[..., n]``, n even, as uint8 ``[..., n / 2]``: nearest, ties to even, saturating; NaN becomes 6."""
    x = x.float()
    size = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for tie, goes_up in _E2M1_TIES:
        code += (size >= tie if goes_up else size > tie).to(torch.uint8)
    code = torch.where(x.isnan(), torch.full_like(code, 7), code) | (torch.signbit(x).to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4)


def from_e2m1(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 (or float4_e2m1fn_x2) ``[..., n / 2]`` as floats ``[..., n]``, exactly."""
    packed = packed.view(torch.uint8)
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=dtype, device=packed.device)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return values[codes.int()]


def to_int4(x: Tensor) -> Tensor:
    """Floats ``[..., n]``, n even, as uint8 ``[..., n / 2]``: nearest, ties to even, from -8 to 7; NaN becomes 0."""
    code = x.float().nan_to_num(0.0, 7.0, -8.0).round().clamp(-8, 7).to(torch.int8).view(torch.uint8) & 15
    return code[..., 0::2] | (code[..., 1::2] << 4)


def from_int4(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 ``[..., n / 2]`` as floats ``[..., n]``, exactly."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return ((codes ^ 8).to(torch.int8) - 8).to(dtype)


def to_e8m0_up(x: Tensor) -> Tensor:
    """The least powers of two that are not below nonnegative floats, as float8_e8m0fnu.

    0 gives 2^-127, values above 2^127 give 2^127, NaN gives NaN.
    """
    bits = x.float().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    exponent = torch.where(bits <= 0x00400000, torch.zeros_like(exponent), exponent).clamp(max=254)
    exponent = torch.where(x.isnan(), torch.full_like(exponent, 255), exponent)
    return exponent.to(torch.uint8).view(E8M0)


def from_e8m0(x: Tensor) -> Tensor:
    """float8_e8m0fnu (or its bytes) as float32, exactly, 2^-127 included."""
    raw = x.view(torch.uint8).int()
    bits = torch.where(raw == 0, torch.full_like(raw, 0x00400000), raw << 23)
    bits = torch.where(raw == 255, torch.full_like(raw, 0x7FC00000), bits)
    return bits.view(torch.float32)
