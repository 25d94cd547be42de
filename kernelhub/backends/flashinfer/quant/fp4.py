"""`quantize_nvfp4` and `quantize_mxfp4` by FlashInfer's kernel, whose bits differ from those of the ops.

The records state the known differences. Scales are row-major, as in the ops.
"""

from __future__ import annotations

import torch
from flashinfer.quantization.fp4_quantization import fp4_quantize
from torch import Tensor

from kernelhub.backends.flashinfer.quant.forced import check_device, check_rounding
from kernelhub.backends.shared.operands import on_device_of, row_major
from kernelhub.ops.quant.adapter import QuantizeAdapter
from kernelhub.ops.quant.problem import MX_GROUP, NVFP4_GROUP, QuantizeMxProblem, QuantizeNvfp4Problem
from kernelhub.ops.quant.reference import clean, global_scale_of


class QuantizeNvfp4(QuantizeAdapter):
    """The global scale is given as it multiplies, and inverted by the kernel; where none is given torch makes it."""

    def __init__(self, problem: QuantizeNvfp4Problem) -> None:
        super().__init__(problem)
        if problem.device.type == "cuda":  # one group, to load or compile the module
            group = torch.zeros(1, NVFP4_GROUP, dtype=getattr(torch, problem.dtype), device="cuda")
            _quantize(group, torch.ones(1, device="cuda", dtype=torch.float32))

    def launch(self, x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> None:
        assert global_scale is not None
        check_device("quantize_nvfp4", self.problem)
        with on_device_of(x):
            if not self.problem.static:
                write_global_scale(x, global_scale)
            made, scales = _quantize(row_major(x), row_major(global_scale.reshape(1)))
            codes.copy_(made)
            scale.view(torch.uint8).copy_(scales)


class QuantizeMxfp4(QuantizeAdapter):
    """Powers of two that are rounded up."""

    def __init__(self, problem: QuantizeMxProblem) -> None:
        super().__init__(problem)
        if problem.device.type == "cuda":  # as of `QuantizeNvfp4`
            _quantize(torch.zeros(1, MX_GROUP, dtype=getattr(torch, problem.dtype), device="cuda"), None)

    def launch(self, x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> None:
        check_device("quantize_mxfp4", self.problem)
        check_rounding("quantize_mxfp4", self.problem)
        with on_device_of(x):
            made, scales = _quantize(row_major(x), None)
            codes.copy_(made)
            scale.view(torch.uint8).copy_(scales)


def write_global_scale(x: Tensor, global_scale: Tensor) -> None:
    """That of the op, which multiplies, made by torch."""
    global_scale.copy_(global_scale_of(clean(x)[0].abs().amax()).expand_as(global_scale))


def _quantize(x: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes [M, K / 2] and bytes of scales [M, groups] of [M, K]; of NVFP4 where there is a global scale."""
    mx = global_scale is None
    made: tuple[Tensor, Tensor] = fp4_quantize(
        x,
        global_scale,
        MX_GROUP if mx else NVFP4_GROUP,
        mx,
        False,
        is_global_scale_inversed=not mx,
        backend="cuda",
    )
    return made
