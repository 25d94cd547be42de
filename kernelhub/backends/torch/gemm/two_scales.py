"""Two scales of a product, whose own product may be no number of float32 where the result is one: 2^127 x 2^127 x 0."""

from __future__ import annotations

import torch
from torch import Tensor

# What e4m3 codes with scales of float32 are made smaller by, each operand: 448 x 2^127 is beyond float32.
LEFT_OF_CODES = 2.0**9
LEFT_OF_E5M2 = 2.0**16  # the same of e5m2, up to 57344


def multiply_by_both(product: Tensor, s: Tensor, t: Tensor) -> None:
    """Multiply in place. Scales on both sides of 1 are multiplied by each other, others one after the other."""
    apart = (s.abs() < 1) != (t.abs() < 1)
    product.mul_(torch.where(apart, s * t, s)).mul_(torch.where(apart, 1.0, t))
