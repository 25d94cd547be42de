# mypy: ignore-errors
"""Scales in registers: e8m0 as float32, and two scales whose product may be no number of float32.

The result may be one where the product of its scales is none: 2^127 x 2^127 x 0. How much is left for the end, and why,
is derived in `kernelhub/ops/gemm/fp8/tolerance.py`.
"""

from __future__ import annotations

from kernelhub.backends.gluon.language import gl, gluon

_LARGEST = gl.constexpr(3.4028234663852886e38)
_HIGH = gl.constexpr(1152921504606846976.0)  # 2^60
_LOW = gl.constexpr(8.673617379884035e-19)  # 2^-60
_STEP = gl.constexpr(9.5367431640625e-07)  # 2^-20
LEFT_OF_BOTH = gl.constexpr(1048576.0)  # 2^20


@gluon.jit
def number(scale, E8M0: gl.constexpr):
    """A scale as float32: e8m0 is the exponent, with 0 for 2^-127 and 255 for NaN."""
    if E8M0:
        raw = scale.to(gl.int32)
        bits = gl.where(raw == 0, 0x400000, raw << 23)
        bits = gl.where(raw == 255, 0x7FC00000, bits)
        scale = bits.to(gl.float32, bitcast=True)
    return scale


@gluon.jit
def of_both(s, t):
    """s * t / 2^20 within float32, for a step of a sum that is multiplied by 2^20 at the end; NaN stays NaN."""
    small = gl.maximum(t, -t) < _LOW
    both = s * gl.where(small, _STEP, 1.0) * gl.where(small, t, t * _STEP)
    both = gl.where(both > _LARGEST, _LARGEST, both)
    return gl.where(both < -_LARGEST, -_LARGEST, both)


@gluon.jit
def halves_of(s):
    """Two factors of s: what of it lies between 2^-60 and 2^60, and the rest, which is multiplied in last."""
    size = gl.maximum(s, -s)
    large = size > _HIGH
    small = size < _LOW
    first = gl.where(large, _HIGH, gl.where(small, _LOW, s))
    last = gl.where(large, s * _LOW, gl.where(small, s * _HIGH, 1.0))
    return first, last
