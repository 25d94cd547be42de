"""Products of many rows: the weight is decoded once, a stretch of its rows at a time, and cuBLAS multiplies.

The product is kept in float32 until its factors and the bias are in: cuBLAS may add the parts of a split K in the
dtype of its result, and scaling what was rounded rounds twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.triton.gemm.finish import finish_kernel
from kernelhub.backends.triton.launch import Launcher
from kernelhub.ops.precision import at_own_precision

_FINISH_BLOCK = 1024
_MOST_BYTES = 256 << 20  # of the decoded rows, and of their product


class DecodedProduct:
    """A product by a weight of n rows and k columns; `left` is a factor of the sums that decoded operands lack."""

    def __init__(self, n: int, k: int, *, bias: bool, has_global: bool, left: float) -> None:
        self._n, self._k = n, k
        self._unit = 16 if n % 16 == 0 else 1
        static: dict[str, Any] = {
            "UNIT": self._unit,
            "HAS_GLOBAL": has_global,
            "HAS_BIAS": bias,
            "LEFT": left,
            "BLOCK": _FINISH_BLOCK,
        }
        self._finish = Launcher(finish_kernel, static, num_warps=4)

    def stretch(self, rows: int) -> int:
        """Rows of the weight that are decoded together for that many rows of activations."""
        most = min(_MOST_BYTES // (2 * self._k), _MOST_BYTES // (4 * rows))
        return min(self._n, max(most // 1024 * 1024, 1024))

    def workspace_bytes(self, rows: int) -> int:
        """Decoded rows, and their product."""
        return self.stretch(rows) * (2 * self._k + 4 * rows)

    def launch(
        self,
        a: Tensor,
        decoded: Callable[[int, int], Tensor],
        global_scale: Tensor | None,
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        """Multiply on the current device; `decoded` gives the weight's rows from its first argument to its second."""
        rows, n = out.shape
        step = self.stretch(rows)
        for first in range(0, n, step):
            last = min(first + step, n)
            product = multiplied(a, decoded(first, last))
            if step == n:
                self._finish_columns(product, global_scale, bias, out)
            else:
                own_bias = None if bias is None else bias[first:last]
                self._finish_columns(product, global_scale, own_bias, out[:, first:last])

    def _finish_columns(self, product: Tensor, global_scale: Tensor | None, bias: Tensor | None, out: Tensor) -> None:
        """What follows a product, for some columns of `out` and the bias of those."""
        rows, columns = out.shape
        aligned = not (product.data_ptr() | out.data_ptr()) & 15
        variant = (out.get_device(), out.stride(), None if bias is None else bias.dtype) if aligned else None
        programs = rows * -(-columns // _FINISH_BLOCK)
        self._finish(programs, variant, product, global_scale, bias, out, columns // self._unit, *out.stride())


@at_own_precision
def multiplied(a: Tensor, weight: Tensor) -> Tensor:
    """a weight^T in float32: ``[M, N]`` of ``[M, K]`` and ``[N, K]``."""
    if a.is_cuda:
        return torch.mm(a, weight.t(), out_dtype=torch.float32)
    return a.float() @ weight.float().t()  # under the interpreter
