"""`quantize_fp8` of groups by FlashInfer's cuTile kernels, whose bits differ from the op's; the record states how.

One kernel writes scales row by row and multiplies by their reciprocals, another column by column and divides; powers
of two come of the latter alone.
"""

from __future__ import annotations

import torch
from flashinfer.quantization.fp8_quantization import per_token_group_quant_8bit
from torch import Tensor

from kernelhub.backends.flashinfer.quant.forced import check_groups
from kernelhub.backends.flashinfer.quant.mxfp8 import filled
from kernelhub.backends.shared.operands import on_device_of
from kernelhub.ops.formats import E4M3, E4M3_MAX, E8M0, to_e8m0_up
from kernelhub.ops.quant.adapter import QuantizeAdapter
from kernelhub.ops.quant.problem import QuantizeFp8Problem
from kernelhub.ops.quant.reference import LEAST_SCALE

_MOST_ELEMENTS = 1 << 30  # of a launch, which are counted by an int together with what a tile is wider than a group


class QuantizeGroups(QuantizeAdapter):
    """A last group that is shorter is filled up with zeros; float8_e8m0fnu is made of powers of two in float32."""

    def __init__(self, problem: QuantizeFp8Problem) -> None:
        super().__init__(problem)
        if problem.device.type == "cuda":  # one group, to compile the kernel
            self._quantize(torch.zeros(1, problem.group_size, dtype=getattr(torch, problem.dtype), device="cuda"))

    def launch(self, x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> None:
        check_groups(self.problem)
        width = x.shape[1]
        whole = filled(x, self.problem.group_size)
        step = max(1, _MOST_ELEMENTS // whole.shape[1])
        with on_device_of(x):
            for low in range(0, x.shape[0], step):
                rows = slice(low, low + step)
                made, scales = self._quantize(whole[rows])
                codes[rows].view(torch.uint8).copy_(made.view(torch.uint8)[:, :width])
                scale[rows].copy_(to_e8m0_up(scales) if scale.dtype is E8M0 else scales)

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [M, K] and float32 scales [M, groups]."""
        problem = self.problem
        made: tuple[Tensor, Tensor] = per_token_group_quant_8bit(
            x,
            problem.group_size,
            E4M3_MAX * LEAST_SCALE,
            E4M3,
            problem.column or problem.ue8m0,
            False,
            problem.ue8m0,
            "cutile",
        )
        return made
