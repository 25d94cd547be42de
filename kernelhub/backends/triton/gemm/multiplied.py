"""A product of matrices of 16 bits in float32, by cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.precision import at_own_precision


@at_own_precision
def multiplied(a: Tensor, weight: Tensor) -> Tensor:
    """a weight^T in float32: ``[M, N]`` of ``[M, K]`` and ``[N, K]``."""
    if a.is_cuda:
        return torch.mm(a, weight.t(), out_dtype=torch.float32)
    return a.float() @ weight.float().t()  # under the interpreter
