"""torch's grouped product, which reads the ends of groups on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.shared.operands import row_major
from kernelhub.ops.gemm.grouped.adapter import GroupedGemmAdapter, GroupedOperands
from kernelhub.ops.precision import without_autocast


class GroupedMm(GroupedGemmAdapter):
    """`grouped_gemm` of contiguous bfloat16 rows. torch allocates the result, which is copied to `out`."""

    def launch(self, operands: GroupedOperands, out: Tensor) -> None:
        assert operands.offsets is not None
        result = self.compute(operands)
        rows = torch.arange(out.shape[0], device=out.device, dtype=torch.int32)
        out.copy_(torch.where((rows < operands.offsets[-1]).unsqueeze(1), result, out))

    @without_autocast
    def compute(self, operands: GroupedOperands) -> Tensor:
        weights = _aligned(operands.b).transpose(1, 2)
        assert operands.offsets is not None
        result: Tensor = torch._grouped_mm(_aligned(operands.a), weights, offs=row_major(operands.offsets))
        return result


class ScaledGroupedMm(GroupedMm):
    """The same of float8, scaled by row and column; one scale is given as often as there are rows or columns.

    Fast accumulation stays off: it adds in the 14 bits of Hopper's instructions throughout.
    """

    @without_autocast
    def compute(self, operands: GroupedOperands) -> Tensor:
        assert operands.offsets is not None
        assert operands.a_scale is not None
        assert operands.b_scale is not None
        groups, n = operands.b.shape[:2]
        of_b = operands.b_scale.reshape((groups, n) if operands.b_scale.numel() == groups * n else (-1, 1))
        result: Tensor = torch._scaled_grouped_mm(
            _aligned(operands.a),
            _aligned(operands.b).transpose(1, 2),
            row_major(operands.a_scale.reshape(-1).expand(operands.a.shape[0])),
            row_major(of_b.expand(groups, n)),
            row_major(operands.offsets),
            out_dtype=torch.bfloat16,
        )
        return result


def _aligned(tensor: Tensor) -> Tensor:
    """Its last dimension contiguous, other strides multiples of 16 bytes; a copy if it is not so already."""
    strides = tensor.stride()
    fits = strides[-1] == 1 and strides[-2] >= tensor.shape[-1]
    fits = fits and all(stride * tensor.element_size() % 16 == 0 for stride in strides[:-1])
    return tensor if fits and tensor.data_ptr() % 16 == 0 else tensor.clone(memory_format=torch.contiguous_format)
