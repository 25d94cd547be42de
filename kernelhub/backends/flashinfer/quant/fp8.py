"""`quantize_mxfp8` and groups of `quantize_fp8` by FlashInfer's kernels, whose bits differ from those of the ops.

The records state how. A last group that is shorter is filled up with zeros, which alters nothing.

Of cuTile's kernels for `quantize_fp8` one writes scales row by row and multiplies by their reciprocals, another column
by column and divides; powers of two come of the latter alone.
"""

from __future__ import annotations

import torch
from flashinfer.quantization import fp8_quantization
from torch import Tensor

from kernelhub.backends.flashinfer.quant.forced import check_device, check_groups, check_rounding
from kernelhub.backends.shared.operands import on_device_of, row_major
from kernelhub.ops.formats import E4M3, E4M3_MAX, E8M0, to_e8m0_up
from kernelhub.ops.quant.adapter import QuantizeAdapter
from kernelhub.ops.quant.problem import MX_GROUP, QuantizeFp8Problem, QuantizeMxProblem
from kernelhub.ops.quant.reference import LEAST_SCALE

_MOST_ELEMENTS = 1 << 30  # of a launch, which are counted by an int together with what a tile is wider than a group


class QuantizeMxfp8(QuantizeAdapter):
    """Powers of two that are rounded up."""

    def __init__(self, problem: QuantizeMxProblem) -> None:
        super().__init__(problem)
        if problem.device.type == "cuda":  # one group, to load or compile the module
            group = torch.zeros(1, MX_GROUP, dtype=getattr(torch, problem.dtype), device="cuda")
            fp8_quantization.mxfp8_quantize(group, False, backend="cuda")

    def launch(self, x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> None:
        check_device("quantize_mxfp8", self.problem)
        check_rounding("quantize_mxfp8", self.problem)
        rows, width = x.shape
        with on_device_of(x):
            made, scales = fp8_quantization.mxfp8_quantize(_filled(x, MX_GROUP), False, backend="cuda")
            codes.view(torch.uint8).copy_(made.view(torch.uint8)[:, :width])
            scale.view(torch.uint8).copy_(scales.view(rows, -1))


class QuantizeGroups(QuantizeAdapter):
    """float8_e8m0fnu is made of powers of two in float32."""

    def __init__(self, problem: QuantizeFp8Problem) -> None:
        super().__init__(problem)
        if problem.device.type == "cuda":  # one group, to compile the kernel
            self._quantize(torch.zeros(1, problem.group_size, dtype=getattr(torch, problem.dtype), device="cuda"))

    def launch(self, x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> None:
        check_groups(self.problem)
        width = x.shape[1]
        whole = _filled(x, self.problem.group_size)
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
        made: tuple[Tensor, Tensor] = fp8_quantization.per_token_group_quant_8bit(
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


def _filled(x: Tensor, group: int) -> Tensor:
    """[M, K] with zeros behind each row until it is whole groups, row after row."""
    rest = -x.shape[1] % group
    return torch.nn.functional.pad(x, (0, rest)) if rest else row_major(x)
