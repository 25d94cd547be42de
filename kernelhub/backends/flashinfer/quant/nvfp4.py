"""`dequantize_nvfp4` to float16, by the library's kernel for caches.

It multiplies as the op says: code by scale, which is exact, then by the global scale. Being compiled with
``-use_fast_math`` it loses products below 2^-126, which are 0 in float16 whatever is done.
"""

from __future__ import annotations

import torch
from flashinfer.quantization.fp4_quantization import get_fp4_kv_dequantization_module
from torch import Tensor

from kernelhub.backends.flashinfer.calls import taking
from kernelhub.backends.shared.operands import is_row_major, on_device_of, row_major
from kernelhub.ops.quant.adapter import DequantizeAdapter
from kernelhub.ops.quant.problem import NVFP4_GROUP, DequantizeProblem

_TAKES = ("fp4_data", "block_scales", "global_scale", "output")
_WIDEST = 1 << 19  # elements of a row, whose scales are kept in 48 KB of shared memory
_MOST = (1 << 31) - 1  # elements of a launch, which are counted by an int


class DequantizeNvfp4(DequantizeAdapter):
    """A block of threads for each row."""

    def __init__(self, problem: DequantizeProblem) -> None:
        super().__init__(problem)
        self._dequantize = taking(get_fp4_kv_dequantization_module().nvfp4_kv_dequant, _TAKES)

    def launch(self, codes: Tensor, scale: Tensor, global_scale: Tensor | None, out: Tensor) -> None:
        assert global_scale is not None
        made = row_major(out) if is_row_major(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        width = columns(out.shape[1])
        rows = _MOST // width
        pieces = (
            row_major(codes.view(torch.uint8)).view(-1, width // 2).split(rows),
            row_major(scale.view(torch.uint8)).view(-1, width // NVFP4_GROUP).split(rows),
            made.view(-1, width).split(rows),
        )
        with on_device_of(out):
            for of_codes, of_scales, of_result in zip(*pieces, strict=True):
                self._dequantize(of_codes, of_scales, row_major(global_scale.reshape(1)), of_result)
        if not is_row_major(out):
            out.copy_(made)


def columns(width: int) -> int:
    """Of a row as the kernel gets it: groups are consecutive, so a long row is several short ones."""
    return width if width <= _WIDEST else min(width & -width, _WIDEST)
