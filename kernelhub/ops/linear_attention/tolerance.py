"""How far linear attention may be from the reference in float64, and why.

Let size be what the op gives for |q|, |k|, |v|, |scale| and |state|: the sum of the sizes of all that is added up. The
unit roundoff u of an operand is 2^-8 for bfloat16, and 2^-10 for float16, which is multiplied as TF32 where it might
overflow, and TF32 may be cut off rather than rounded.

* Chunks are multiplied on tensor cores. Scores within a chunk are rounded once to the operands' type, relative u. So
  is the state before it multiplies q, and so are the keys times their decay that enter the state: no element of the
  result is off by more than 2 u size, none of the state by more than u size(state). Kernels without such products have
  neither.
* Sums in float32 of D products and of n tokens, and as many powers of the decay, each product of which is relatively
  off by less than 2^-22, add (n + D + 128) 2^-22 size. The state is float32.
* The result is rounded to its type once: 2^-8, 2^-11 or 2^-24 of its own size.
"""

from __future__ import annotations

import torch
from torch import Tensor

_OPERAND = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 0.0}
_RESULT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def result_error_allowed(
    want: Tensor, size: Tensor, dtype: torch.dtype, tokens: int, head_dim: int, *, rounds_operands: bool
) -> Tensor:
    """The allowed error of each element of the result.

    Args:
        want: the result in float64.
        size: what the op gives for absolute values, in float64.
        dtype: of the operands.
        tokens: of the longest sequence, those before its state not counted.
        head_dim: width of q and k.
        rounds_operands: the kernel multiplies chunks in the operands' type.
    """
    products = 2 * _OPERAND[dtype] if rounds_operands else 0.0
    return (products + _sums(tokens, head_dim)) * size + _RESULT[dtype] * want.abs()


def state_error_allowed(
    size: Tensor, dtype: torch.dtype, tokens: int, head_dim: int, *, rounds_operands: bool
) -> Tensor:
    """The allowed error of each element of the state; arguments as of `result_error_allowed`."""
    return ((_OPERAND[dtype] if rounds_operands else 0.0) + _sums(tokens, head_dim)) * size


def _sums(tokens: int, head_dim: int) -> float:
    return (tokens + head_dim + 128) * 2.0**-22
