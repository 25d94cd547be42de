"""How far a result may be from the reference, and why.

A result is a sum of terms w_k w2[h, i] a[k, i] (and biases) over experts k and columns i. What is rounded on the way:

* a, the intermediate, to the dtype of the tokens, after gate and up may have been rounded to it too: each of
  them within half a spacing, u / 2 (u = 2^-7 relative for bfloat16, 2^-10 for float16), and none moves a by more
  than about its own relative error (|d silu / d g| <= 1.1);
* what an expert adds, and the result, to that dtype: each within u / 2 of its size;
* weights, where a kernel multiplies codes by scales before it multiplies by them: within u / 2 (float32 scales; also
  MXINT4, of which a code of 3 bits times a bfloat16 scale of 8 has 11);
* what the router weighs by, where a kernel takes it in bfloat16: within u / 2, as what an expert adds;
* float32 sums of up to 2^13 terms: 2^6.5 roundings of 2^-24, taken together 2^-17 of what a random walk of the terms
  reaches, and twice that for two matrix products.

A gate below the least number of float32 adds nothing, as in exact arithmetic. So no result is NaN while sizes of terms
add up to less than 2^128, nor where those of the gate are more and all below 0, and those of up less.

These errors are independent and of mean zero. Hoeffding: with terms that are off by at most e t_i each, the sum is
off by more than 8 e sqrt(sum t_i^2) with a chance of 2^-45. So with

    S^2 = sum_k (w_k^2 sum_i (w2 a)^2 + (what k adds)^2) + result^2

no element is off by more than 8 e S; e = u / 2 + 2^-16. All together, their squares add up to e^2 sum S^2 on average at
most, but one rounding of a moves a whole row: a part of the sum of squares, c^2 = w_k^2 a^2 sum_h w2[h, i]^2 of it. Its
share of the average is e^2 c^2 at most, and three roundings reach nine times that. So with

    F^2 = sum c^4 + sum S^4

(the second for the roundings of elements, and for products of two errors of a row) the sum of squares is no more than
e^2 (sum S^2 + 8 F): nine times the average where one rounding is all, 1 + 8 / sqrt(n) times where n count alike. With
thousands of them that is 0.4 % for bfloat16: it detects a factor that is off by a percent.

Activations in fp8 are quantised from the same bits on both sides unless a rounding before went the other way, which
tensor cores that keep 14 bits (2^-13) make happen to 2^-5 of the intermediates of bfloat16. Where that is the largest
of its row, the row is quantised anew with a scale that is off by 2^-8; then 2^-4.5 of its codes move, by 2^-3.5,
which is 2^-5.75 in root mean square, of such a row. So there e is 2^-6 for single elements, 2^-7 for all together.

Opt-in formats round more, and the reference rounds in the same way. The remaining difference is codes that differ:
`doubts` follows that term by term. With D the deviation of the sum of terms, a result must be within

    8 sqrt((e S)^2 + D^2)  for an element,  sqrt((e S)^2 + (2 D)^2 + 8 e^2 F)  for all in root mean square,

with the e above of results and weights. Where kernels may round gate and up or not, a result has to agree with one of
both, as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.ops.formats import E4M3
from kernelhub.ops.moe.experts.doubts import doubtful_parts, fourth_powers
from kernelhub.ops.moe.experts.problem import FP8_BLOCK_GATE_UP
from kernelhub.ops.moe.experts.reference import parts_of

_HALF_SPACING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
_SIGMAS = _SPREADS = 8.0


@dataclass(frozen=True)
class ToleranceCheck:
    """The comparison of a result with the reference.

    Attributes:
        worst: largest error of an element over what is allowed.
        overall: root mean square error over what is allowed.
        finite: whether every element is.
    """

    worst: float
    overall: float
    finite: bool

    @property
    def ok(self) -> bool:
        return self.finite and self.ratio <= 1.0

    @property
    def ratio(self) -> float:
        """The worse of both."""
        return max(self.worst, self.overall)


class Expected(NamedTuple):
    """The references of a result, one for each way in which kernels may round.

    Attributes:
        want: the reference's result, [T, H].
        squares: S^2 of it.
        spread: F of it.
        doubts: allowance for codes that may differ, squared; None without an opt-in format.
    """

    want: Tensor
    squares: Tensor
    spread: float
    doubts: Tensor | None = None


def expected_of(arguments: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[Expected, ...]:
    """What the reference gives in `dtype`, for arguments as of the op; codes are followed in float64."""
    asked = arguments.get("activation_dtype")
    if isinstance(asked, str):
        ways = (False,) if asked == FP8_BLOCK_GATE_UP else (False, True)
        return tuple(_expected_codes(arguments, way) for way in ways)
    return (_expected(arguments, dtype),)


def compare(
    out: Tensor,
    arguments: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    expected: Sequence[Expected] | None = None,
) -> ToleranceCheck:
    """A result of `fused_moe` against the reference in `dtype`, for arguments as of the op.

    `expected` is the result of `expected_of` for them, if there is one.
    """
    rounding = _HALF_SPACING[out.dtype] + 2.0**-16
    quantized = arguments["w13"].dtype is E4M3 and arguments.get("activation_dtype") in (None, E4M3)
    ways = []
    for want, squares, spread, doubts in expected or expected_of(arguments, dtype):
        single, overall = (rounding + 2.0**-6, rounding + 2.0**-7) if quantized else (rounding, rounding)
        doubtful = 0.0 if doubts is None else doubts
        most = float((overall**2 * squares + 4.0 * doubtful).sum()) + _SPREADS * overall**2 * spread
        ways.append(_agreement(out, want, (single**2 * squares + doubtful).sqrt(), math.sqrt(most)))
    return min(ways, key=lambda agreement: agreement.ratio)


def _agreement(out: Tensor, want: Tensor, single: Tensor, overall: float) -> ToleranceCheck:
    """With what an eighth of a single error, and the root of the sum of all squares, may be."""
    error = (out.to(want.dtype) - want).abs()
    tiny = 2.0**-24 if out.dtype is torch.float16 else 2.0**-100
    return ToleranceCheck(
        float((error / (_SIGMAS * single + tiny)).amax()) if error.numel() else 0.0,
        float(error.square().sum().sqrt()) / (overall + tiny),
        bool(out.isfinite().all()),
    )


def _spread(squares: Tensor, of_rows: Tensor) -> float:
    """F, of S^2 and of the sum of c^4."""
    return math.sqrt(float(squares.double().square().sum() + of_rows))


def _expected_codes(arguments: dict[str, Any], rounds_halves: bool) -> Expected:
    """The reference's result in an opt-in format, in float64."""
    x, residual = arguments["x"], arguments.get("residual")
    want = torch.zeros(x.shape, dtype=torch.float64, device=x.device) if residual is None else residual.double()
    squares, doubts = torch.zeros_like(want), torch.zeros_like(want)
    of_rows = want.new_zeros((), dtype=torch.float64)
    for part in doubtful_parts(arguments, rounds_halves):
        want = want.index_add(0, part.tokens, part.result)
        squares.index_add_(0, part.tokens, part.squares + part.result.square())
        doubts.index_add_(0, part.tokens, part.doubts)
        of_rows = of_rows + part.of_rows
    squares += want.square()
    return Expected(want, squares, _spread(squares, of_rows), doubts)


def _expected(arguments: dict[str, Any], dtype: torch.dtype) -> Expected:
    """The reference's result."""
    x, residual = arguments["x"], arguments.get("residual")
    want = torch.zeros(x.shape, dtype=dtype, device=x.device) if residual is None else residual.to(dtype)
    squares, of_rows = torch.zeros_like(want), want.new_zeros((), dtype=torch.float64)
    for part in parts_of(**arguments, dtype=dtype):
        want = want.index_add(0, part.tokens, part.result)
        terms = (part.inner.square() @ part.w2.square().t()) * part.weights.square()
        squares.index_add_(0, part.tokens, terms + part.result.square())
        of_rows = of_rows + fourth_powers(part.inner, part.w2, part.weights)
    squares += want.square()
    return Expected(want, squares, _spread(squares, of_rows))
