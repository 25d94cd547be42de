"""`quantize_nvfp4` by the library's kernel for caches, whose bits differ from those of the op; the record states how.

Its global scale multiplies, as that of the op, and it writes to a given destination.
"""

from __future__ import annotations

import torch
from flashinfer.quantization.fp4_quantization import get_fp4_kv_quantization_module
from torch import Tensor

from kernelhub.backends.flashinfer.calls import taking
from kernelhub.backends.flashinfer.quant.forced import check_device
from kernelhub.backends.flashinfer.quant.fp4 import write_global_scale
from kernelhub.backends.shared.operands import is_row_major, on_device_of, row_major
from kernelhub.ops.quant.adapter import QuantizeAdapter
from kernelhub.ops.quant.problem import QuantizeNvfp4Problem

_TAKES = ("input", "global_scale", "fp4_output", "block_scales")
_MOST = (1 << 31) - 1  # elements of a launch, which are counted by an int


class QuantizeNvfp4Kv(QuantizeAdapter):
    """A block of threads for each row."""

    def __init__(self, problem: QuantizeNvfp4Problem) -> None:
        super().__init__(problem)
        self._quantize = taking(get_fp4_kv_quantization_module().nvfp4_kv_quant, _TAKES)

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
