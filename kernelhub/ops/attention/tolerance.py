"""How far a kernel may be from the reference, and why.

A result is out = P V, where P are the softmax weights of a row and sum to at most 1. A kernel whose dot
products accumulate in float32 differs from the exact result by

* the rounding of P to the dtype of V before the second product: relative u per weight;
* the rounding of the result to the output dtype: relative u;
* float32 rounding of scores, exponentials, sums, rescaling and merges: relative 2^-20 or so per weight,
  for scores below 2^5 and some 2^12 terms; 2^-17 leaves room.

u is the unit roundoff: 2^-8 for bfloat16, 2^-11 for float16, 2^-24 for float32. Two bounds follow.

* Largest error of any element: (2 u + 2^-17) max |V|, since the weights of a row sum to at most 1.
* Error of a whole result, as a ratio of root mean squares: rounding errors are spread evenly over
  (-u, u), so each of the two roundings adds u / sqrt(3), together 0.82 u. 2 u + 2^-17 is allowed.

In float16 a weight that is rounded has an absolute error besides. In the Triton kernels it is 2^-40 of the largest
weight of the row (operands of float16, and caches of float8), in libraries 2^-25: together 2^-25 N max |V| for N keys,
below u max |V| up to 2^14 of them. Of values behind weights below 2^-25 of the largest libraries give nothing then. In
bfloat16, and in torch's kernels on a CPU, weights have the range of float32.

The second is the sharp one: an ignored mask, sink or softcap is off by percents, 2 u of bfloat16 is 0.8 %.
LSE is a float32 log of a float32 sum. Its error is the relative error of the exponentials, which kernels may
approximate to well within the rounding of the weights: u / 16 is allowed, and 2^-16 for float32 scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
_FLOAT32_TERMS = 2.0**-17


@dataclass(frozen=True)
class ToleranceCheck:
    """A result compared with the reference.

    Attributes:
        largest: largest absolute error of any element.
        largest_allowed: what it may be.
        rms_ratio: root mean square of the error over that of the reference.
        rms_ratio_allowed: what it may be.
        all_finite: whether every element is a number.
    """

    largest: float
    largest_allowed: float
    rms_ratio: float
    rms_ratio_allowed: float
    all_finite: bool

    @property
    def ok(self) -> bool:
        return self.all_finite and self.largest <= self.largest_allowed and self.rms_ratio <= self.rms_ratio_allowed

    def __str__(self) -> str:
        if not self.all_finite:
            return "some elements are NaN or infinite"
        return (
            f"largest error {self.largest:.1e} (allowed {self.largest_allowed:.1e}), "
            f"RMS error {self.rms_ratio:.1e} of the result (allowed {self.rms_ratio_allowed:.1e})"
        )


def compare_out(out: Tensor, reference: Tensor, largest_value: float) -> ToleranceCheck:
    """Compare `out` with the reference; `largest_value` is max |V|, scales applied."""
    bound = 2 * _UNIT_ROUNDOFF[out.dtype] + _FLOAT32_TERMS
    exact = reference.double()
    error = out.double() - exact
    largest = float(error.abs().max()) if error.numel() else 0.0
    norm = float(exact.square().sum().sqrt())
    ratio = float(error.square().sum().sqrt()) / norm if norm else largest
    return ToleranceCheck(largest, bound * largest_value, ratio, bound, bool(torch.isfinite(out).all()))


def lse_tolerance(dtype: torch.dtype) -> float:
    """Largest allowed |lse - reference| of a kernel whose output has `dtype`."""
    return max(_UNIT_ROUNDOFF[dtype] / 16, 2.0**-16)


def compare_lse(lse: Tensor, reference: Tensor) -> float:
    """Largest absolute error of an LSE, infinite where only one of the two is -inf."""
    error = (lse.double() - reference.double()).abs()
    error = torch.where(lse.double() == reference.double(), torch.zeros_like(error), error)
    return float(error.nan_to_num(nan=float("inf"), posinf=float("inf")).max()) if error.numel() else 0.0
