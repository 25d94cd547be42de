"""Matrices of a batch made float32, as many at a time as fit the caches, and multiplied."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.torch.attention.sequences import e4m3_values, e5m2_values
from kernelhub.backends.torch.gemm.two_scales import multiply_by_both
from kernelhub.ops.formats import E5M2
from kernelhub.ops.gemm.fp8.batched.adapter import BmmFp8Adapter
from kernelhub.runtime.precision import at_own_precision
from kernelhub.runtime.scratch import scratch

_WEIGHTS = {"cpu": 1 << 20, "cuda": 1 << 26}  # at a time: 4 MB and 256 MB in float32


class DequantizedBatch(BmmFp8Adapter):
    """`bmm_fp8` anywhere."""

    @at_own_precision
    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
        batch, rows, columns = a.shape
        of_a, of_b = (scale.reshape(-1, 1, 1).expand(batch, 1, 1) for scale in (a_scale, b_scale))
        step = max(1, _WEIGHTS[a.device.type] // (max(rows, b.shape[1]) * columns))
        for start in range(0, batch, step):
            some = slice(start, start + step)
            left, right = _values("bmm_fp8 a", a[some]), _values("bmm_fp8 b", b[some])
            product = torch.bmm(left, right.transpose(1, 2))
            multiply_by_both(product, of_a[some], of_b[some])
            out[some] = product


def _values(tag: str, codes: Tensor) -> Tensor:
    """Codes as float32."""
    if codes.device.type != "cpu":
        return codes.float()
    values = scratch(tag, codes.shape, torch.float32, codes.device)
    (e5m2_values if codes.dtype is E5M2 else e4m3_values)(tag, codes, values)
    return values
