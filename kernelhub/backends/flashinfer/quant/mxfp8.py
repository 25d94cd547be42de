"""`quantize_mxfp8` by FlashInfer's kernel, whose bits differ from those of the op; the record states how."""

from __future__ import annotations

import torch
from flashinfer.quantization.fp8_quantization import mxfp8_quantize
from torch import Tensor

from kernelhub.backends.flashinfer.quant.forced import check_device, check_rounding
from kernelhub.backends.shared.operands import on_device_of, row_major
from kernelhub.ops.quant.adapter import QuantizeAdapter
from kernelhub.ops.quant.problem import MX_GROUP, QuantizeMxProblem


class QuantizeMxfp8(QuantizeAdapter):
    """Powers of two that are rounded up. A last group that is shorter is filled up with zeros, which alters nothing."""

    def __init__(self, problem: QuantizeMxProblem) -> None:
        super().__init__(problem)
        if problem.device.type == "cuda":  # one group, to load or compile the module
            group = torch.zeros(1, MX_GROUP, dtype=getattr(torch, problem.dtype), device="cuda")
            mxfp8_quantize(group, False, backend="cuda")

    def launch(self, x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> None:
        check_device("quantize_mxfp8", self.problem)
        check_rounding("quantize_mxfp8", self.problem)
        rows, width = x.shape
        with on_device_of(x):
            made, scales = mxfp8_quantize(filled(x, MX_GROUP), False, backend="cuda")
            codes.view(torch.uint8).copy_(made.view(torch.uint8)[:, :width])
            scale.view(torch.uint8).copy_(scales.view(rows, -1))


def filled(x: Tensor, group: int) -> Tensor:
    """[M, K] with zeros behind each row until it is whole groups, row after row."""
    rest = -x.shape[1] % group
    return torch.nn.functional.pad(x, (0, rest)) if rest else row_major(x)
