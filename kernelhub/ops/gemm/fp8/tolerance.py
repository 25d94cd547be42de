"""How far a product of float8 matrices may be from the reference, and why.

Products of two e4m3 numbers are exact in float32, so an element is off only by how they are added up and by the last
rounding. Let u be the unit roundoff of the result's dtype (2^-8, 2^-11, 2^-24 for bfloat16, float16, float32), `mass`
the sum of |terms| with their scales, and `spread` the root of the sum of their squares, which is the size of a sum of
terms of random sign.

* **float32 sums.** One running sum of K terms makes K roundings of 2^-24 of itself at most. Being of random sign they
  come to about 2^-25 sqrt(K) spread; 2^-17 spread bounds their root mean square up to K = 65536. (8 + K/64) 2^-24 mass
  bounds the largest, since mass is about 0.8 sqrt(K) spread.
* **float8 matrix instructions** (NVIDIA from sm_89 on) add 32 products and the sum so far in fixed point, with 13 bits
  below the largest of them on Hopper (DeepSeek-V3, section 3.3.2), and our kernels move sums to float32 every 128
  columns. So a block of 128 has 132 addends, each cut off by up to 2^-13 of the largest, which is about the block's
  spread. Cuts go against the sign of each term, 2^-14 spread in the mean: together 2^-14 sqrt(132) = 2^-10.5 spread;
  their random part is half of that. 2^-9 spread bounds the root mean square, 2^-10 mass the largest.

* **16-bit matrix instructions**, of activations that are not quantised, add 16 products and the sum so far and cut off
  what is 2^-23 below it: K/16 cuts, of 2^-24 of the sum so far in the mean and towards zero. (8 + K/8) 2^-24 mass
  bounds the largest; the sum growing as a root does, the mean is K/24 2^-24 spread, for which 2^-12.5 spread serves
  up to K = 65536, and 2^-12 is allowed.

So an element may be off by u |result| + the bound of the sums times mass, and the root mean square over a row or a
column, of errors divided by their spread, is at most u rms(result / spread) + the bound there, both and half the
spacing of the least numbers of the dtype. The second is the sharp
one: a wrong scale or a missing tail is off by percents.

Two scales may have a product that is no number of float32, 2^127 x 2^127, where the result is one. Those of rows are
multiplied into the sum one after the other, in an order in which nothing leaves float32 that the result does not. Those
of blocks are multiplied over 2^20 in Triton, and sums by 2^20 at the end, which takes no instruction more in a step. No
sum but 0 is below 2^-18, so a product that is too large yet makes a result infinite. So no result is NaN while the mass
is below 2^128. The loss is at the other end: products of scales are rounded to multiples of 2^-129, and sums of a
block to multiples of 2^-129, or 2^-113 where bytes are multiplied as float16 (before sm_89): results above 1e-29 do not
see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.ops.formats import E8M0

_UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
_FEWEST = 32  # elements of a row whose root mean square says something


@dataclass(frozen=True)
class ToleranceCheck:
    """The error of a result over the allowed error: at most 1 is right.

    Attributes:
        largest: of any element.
        row: root mean square of the worst row, 0 where rows are too short for a bound.
        column: the same of columns.
    """

    largest: float
    row: float
    column: float

    @property
    def ok(self) -> bool:
        return max(self.largest, self.row, self.column) <= 1.0


class Expected(NamedTuple):
    """The reference of every result of a call, in float64.

    Attributes:
        exact: the reference's result.
        mass: the sums of |terms|.
        spread: the sums of their squares.
    """

    exact: Tensor
    mass: Tensor
    spread: Tensor


def expected_of(reference: Any, operands: dict[str, Any]) -> Expected:
    """The reference's result for a call; arguments as of `compare`."""
    plain = {name: value for name, value in operands.items() if name != "bias"}
    return Expected(reference(**operands, dtype=torch.float64), *(_sums(reference, plain, power) for power in (1, 2)))


def compare(
    out: Tensor,
    reference: Any,
    operands: dict[str, Any],
    *,
    matrix_instructions: bool,
    expected: Expected | None = None,
) -> ToleranceCheck:
    """Hold a result [..., M, N] against the reference.

    Args:
        out: the result.
        reference: the op's reference function.
        operands: arguments of the call.
        matrix_instructions: whether sums may be those of matrix instructions.
        expected: the result of `expected_of` for the call, if there is one.
    """
    exact, mass, spread = expected or expected_of(reference, operands)
    sums, mean_sums = _of_sums(operands["a"], matrix_instructions)
    u = _UNIT_ROUNDOFF[out.dtype]
    error = (out.double() - exact).abs().nan_to_num(nan=torch.inf)
    spread = spread.clamp(min=1e-300).sqrt()
    least = torch.finfo(out.dtype).smallest_normal * u  # half of the least number's spacing
    tiny = torch.where(spread > 1e-100, least / spread, 0.0)
    share = error / (u * exact.abs() + sums * mass + torch.finfo(out.dtype).smallest_normal)
    rows, columns = (
        float((_rms(error / spread, dim) / (u * _rms(exact / spread, dim) + mean_sums + _rms(tiny, dim))).max())
        if out.shape[dim] >= _FEWEST
        else 0.0
        for dim in (-1, -2)
    )
    return ToleranceCheck(float(share.max()), rows, columns)


def _of_sums(a: Tensor, matrix_instructions: bool) -> tuple[float, float]:
    """What sums may be off: of mass the largest, of spread the root mean square."""
    k = a.shape[-1]
    if not matrix_instructions:
        return (8 + k / 64) * 2.0**-24, 2.0**-17
    return (2.0**-10, 2.0**-9) if a.dtype.itemsize == 1 else ((8 + k / 8) * 2.0**-24, 2.0**-12)


def _sums(reference: Any, operands: dict[str, Any], power: int) -> Tensor:
    """The product with every element replaced by its size, to a power."""
    sized = {
        name: _sized(value, power) if value is not None and name in ("a", "b", "a_scale", "b_scale") else value
        for name, value in operands.items()
    }
    result: Tensor = reference(**sized, dtype=torch.float64)
    return result


def _sized(tensor: Tensor, power: int) -> Tensor:
    """|x|^power, as float32, or as the bytes of exponents."""
    if tensor.dtype in (E8M0, torch.uint8):
        raw = tensor.view(torch.uint8).int()
        return (power * (raw - 127) + 127).clamp(0, 254).to(torch.uint8)
    return tensor.float().abs() ** power


def _rms(values: Tensor, dim: int) -> Tensor:
    return values.square().mean(dim).sqrt()
