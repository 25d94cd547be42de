# mypy: ignore-errors
"""Device code that families share: constants, and the number formats of quantised tensors, exact on every GPU.

float8 and float4 come as bytes (uint8). Decoding is exact; encoding rounds to nearest, ties to even, and
saturates. Nothing here needs a conversion that sm_80 lacks, unless NATIVE says that there is one.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
E4M3_MAX = tl.constexpr(448.0)
E2M1_MAX = tl.constexpr(6.0)


@triton.jit
def e4m3_scaled(raw, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """float8_e4m3fn bytes as `dtype`, divided by 256 where there is no native conversion.

    There the bits are moved into a float16, whose exponent bias is larger by 8: exact, subnormals included.
    NaN (0x7f, 0xff) is kept.
    """
    if NATIVE:
        return raw.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(dtype)
    wide = raw.to(tl.uint16)
    magnitude = wide & 0x7F
    bits = ((wide & 0x80) << 8) | tl.where(magnitude == 0x7F, 0x7F00, magnitude << 7).to(tl.uint16)
    return bits.to(tl.float16, bitcast=True).to(dtype)


@triton.jit
def e4m3_to_float(raw, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """float8_e4m3fn bytes as `dtype`, which holds every one of them."""
    value = e4m3_scaled(raw, dtype, NATIVE)
    if NATIVE:
        return value
    return (value.to(tl.float32) * 256.0).to(dtype)


@triton.jit
def e5m2_to_float(raw, dtype: tl.constexpr):
    """float8_e5m2 bytes as `dtype`: they are the upper half of a float16."""
    return (raw.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)


@triton.jit
def float_to_e4m3(x):
    """float32 as float8_e4m3fn bytes. NaN stays NaN, infinity becomes 448.

    Bits are worked by hand: the conversion of sm_89 rounds twice in Triton 3.6.
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    rounded = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20  # three bits of mantissa
    normal = rounded - 960  # the exponent bias of float32 is larger by 120
    # Below 2^-6 the step is 2^-9: adding 2^14 leaves just those bits at the end of the mantissa.
    small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    code = tl.where(size >= 0x43E80000, 0x7E, code)  # from 464, half way to what would follow 448
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def float_to_e5m2(x):
    """float32 as float8_e5m2 bytes. NaN stays NaN, infinity becomes 57344."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    rounded = (size + 0xFFFFF + ((size >> 21) & 1)) >> 21  # two bits of mantissa
    normal = rounded - 448  # the exponent bias of float32 is larger by 112
    # Below 2^-14 the step is 2^-16: adding 2^7 leaves just those bits at the end of the mantissa.
    small = (tl.abs(x) + 128.0).to(tl.uint32, bitcast=True) - 0x43000000
    code = tl.where(size < 0x38800000, small, normal)
    code = tl.where(size >= 0x47600000, 0x7B, code)  # from 57344, the largest number
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def e2m1_to_float(code):
    """The lower four bits of integers as float32: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    code = code.to(tl.uint32)
    exponent = (code >> 1) & 3
    mantissa = code & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    subnormal = mantissa * 0x3F000000  # 0.5
    bits = tl.where(exponent == 0, subnormal, normal) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def float_to_e2m1(x):
    """float32 as four bits, saturating at 6; NaN becomes 6 with its sign."""
    size = tl.minimum(tl.abs(x), 6.0)
    # Steps are half the power of two below a number, 0.5 at least. Beside 2^22 times that power they are the last bit.
    power = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    beside = power + 0x0B000000
    steps = (size + beside.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - beside
    code = steps + ((power - 0x3F800000) >> 22)
    sign = (x.to(tl.uint32, bitcast=True) >> 28).to(tl.int32) & 8
    return code | sign


@triton.jit
def e8m0_to_float(raw):
    """float8_e8m0fnu bytes as float32: 2^(raw - 127), which is subnormal for 0; 255 is NaN."""
    bits = raw.to(tl.uint32) << 23
    bits = tl.where(raw == 0, 0x00400000, bits)
    bits = tl.where(raw == 255, 0x7FC00000, bits).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def float_to_e8m0_up(x):
    """The least power of two that is not below nonnegative float32 values, as float8_e8m0fnu bytes.

    0 gives 2^-127, what lies above 2^127 gives that, NaN gives 255.
    """
    bits = x.to(tl.uint32, bitcast=True)
    exponent = (bits >> 23) & 0xFF
    exponent += tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    # Subnormals of float32: up to 2^-127, which is 0x00400000, the answer is 0, beyond it 1.
    exponent = tl.where(bits <= 0x00400000, 0, exponent)
    exponent = tl.where(exponent > 254, 254, exponent)
    exponent = tl.where(x != x, 255, exponent)
    return exponent.to(tl.uint8)
