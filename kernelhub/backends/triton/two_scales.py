# mypy: ignore-errors
"""Two scales of a sum, whose product may be no number of float32 where the result is one: 2^127 x 2^127 x 0."""

from __future__ import annotations

import triton
import triton.language as tl

# No sum of products of e4m3 codes but 0 is below 2^-18, and none of their 256ths below 2^-34 and a factor of 2^16.
LEFT_OF_BOTH = 2.0**20
_LEFT = tl.constexpr(LEFT_OF_BOTH)
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def of_both(s, t):
    """s * t / 2^20, for a step of a sum that is multiplied by 2^20 (`LEFT_OF_BOTH`) when it is whole.

    Where that is too large yet, the largest float32: times 0 it is 0, times any other sum and 2^20 infinite. An
    infinite scale counts as the largest.

    The step of a product of blocks waits for this, so it is four instructions for each s: t, of which a thread holds
    fewer, tells from which of the two 2^20 is taken, so that neither leaves the normal numbers where the product is
    one that a result shows.
    """
    small = tl.abs(t) < 8.673617379884035e-19  # 2^-60
    both = s * tl.where(small, 1.0 / _LEFT, 1.0) * tl.where(small, t, t * (1.0 / _LEFT))
    both = tl.minimum(both, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(both, -_LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def times_both(acc, s, t):
    """acc * s * t, of a sum of codes: 0, or between 2^-40 and 2^40. Of s what is beyond 2^60 or below 2^-60 comes last.

    So nothing on the way is beyond float32, or below its normal numbers, that the result is not. s should be that of
    rows, of which a thread holds few: with choices for each element a tile of 128 x 256 spilled 1500 bytes.
    """
    large = tl.abs(s) > 1152921504606846976.0  # 2^60
    small = tl.abs(s) < 8.673617379884035e-19  # 2^-60
    first = tl.where(large, 1152921504606846976.0, tl.where(small, 8.673617379884035e-19, s))
    last = tl.where(large, s * 8.673617379884035e-19, tl.where(small, s * 1152921504606846976.0, 1.0))
    return acc * first * t * last
