"""`dequantize_nvfp4` to float16 and `quantize_nvfp4` by the library's kernels for caches.

The dequantiser multiplies as the op says: code by scale, which is exact, then by the global scale. Being compiled with
``-use_fast_math`` it loses products below 2^-126, which are 0 in float16 whatever is done.

The quantiser's bits differ from those of the op; the record states how. Its global scale multiplies, as that of the
op, and it writes to a given destination.
"""

from __future__ import annotations

import torch
from flashinfer.quantization import fp4_quantization
from torch import Tensor

from kernelhub.backends.flashinfer.calls import taking
from kernelhub.backends.flashinfer.quant.forced import check_device
from kernelhub.backends.flashinfer.quant.fp4 import write_global_scale
from kernelhub.backends.shared.operands import is_row_major, on_device_of, row_major
from kernelhub.ops.quant.adapter import DequantizeAdapter, QuantizeAdapter
from kernelhub.ops.quant.problem import NVFP4_GROUP, DequantizeProblem, QuantizeNvfp4Problem

_DEQUANTIZER_TAKES = ("fp4_data", "block_scales", "global_scale", "output")
_QUANTIZER_TAKES = ("input", "global_scale", "fp4_output", "block_scales")
_WIDEST = 1 << 19  # elements of a row, whose scales are kept in 48 KB of shared memory
_MOST = (1 << 31) - 1  # elements of a launch, which are counted by an int


class DequantizeNvfp4(DequantizeAdapter):
    """A block of threads for each row."""

    def __init__(self, problem: DequantizeProblem) -> None:
        super().__init__(problem)
        self._dequantize = taking(
            fp4_quantization.get_fp4_kv_dequantization_module().nvfp4_kv_dequant, _DEQUANTIZER_TAKES
        )

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


class QuantizeNvfp4Kv(QuantizeAdapter):
    """A block of threads for each row."""

    def __init__(self, problem: QuantizeNvfp4Problem) -> None:
        super().__init__(problem)
        self._quantize = taking(fp4_quantization.get_fp4_kv_quantization_module().nvfp4_kv_quant, _QUANTIZER_TAKES)

    def launch(self, x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> None:
        assert global_scale is not None
        check_device("quantize_nvfp4", self.problem)
        places = [codes, scale.view(torch.uint8)]
        with on_device_of(x):
            if not self.problem.static:
                write_global_scale(x, global_scale)
            made = [place if is_row_major(place) else torch.empty_like(place).contiguous() for place in places]
            rows = max(1, _MOST // x.shape[1])
            pieces = (part.split(rows) for part in (row_major(x), *map(row_major, made)))
            for of_x, of_codes, of_scales in zip(*pieces, strict=True):
                self._quantize(of_x, row_major(global_scale.reshape(1)), of_codes, of_scales)
            for place, result in zip(places, made, strict=True):
                if place is not result:
                    place.copy_(result)


def columns(width: int) -> int:
    """Of a row as the kernel gets it: groups are consecutive, so a long row is several short ones."""
    return width if width <= _WIDEST else min(width & -width, _WIDEST)
