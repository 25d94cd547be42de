"""What FlashInfer asks of tensors, and of the factor of the scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernelhub.backends.shared.operands import aligned

LN2 = math.log(2.0)
_EXPONENTS = (-6, 1)  # of factors from 2 ** -7 to 2: those of real models, as they are


def alike(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Both aligned and with the same strides, since kernels read one by the strides of the other.

    A cache that is neither is copied as a whole, which costs more than the attention.
    """
    k, v = aligned(k), aligned(v)
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    return k, v


def split_scale(scale: float) -> tuple[float, float]:
    """A factor of scores as one that kernels are right with, and a power of two for q that makes up for it.

    Masked scores are -5e4 before they are multiplied by the factor: with one that is negative, zero or tiny they would
    be seen. Multiplying q by a power of two rounds nothing.
    """
    if scale == 0.0:
        return 1.0, 0.0
    mantissa, exponent = math.frexp(scale)
    if mantissa > 0 and _EXPONENTS[0] <= exponent <= _EXPONENTS[1]:
        return scale, 1.0
    return abs(mantissa) / 8, math.copysign(math.ldexp(8.0, exponent), mantissa)


def write_lse(base2: Tensor, lse: Tensor) -> None:
    """An LSE to base 2 of [T, H] as the natural one of [H, T] or [num_seqs, H, tokens]."""
    if lse.ndim == 3:
        num_seqs, heads, tokens = lse.shape
        base2 = base2.view(num_seqs, tokens, heads).transpose(1, 2)
    else:
        base2 = base2.t()
        lse = lse[:, : base2.shape[1]]
    torch.mul(base2, LN2, out=lse)
