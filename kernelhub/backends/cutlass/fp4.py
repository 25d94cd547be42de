"""`fp4_gemm` of NVFP4 by NVFP4: codes as they are, scales in the order in which tensor cores fetch them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernelhub.backends.cutlass.libraries import VLLM, operator, supports
from kernelhub.backends.shared.operands import is_row_major, row_major
from kernelhub.backends.shared.scales import tiled, untiled
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.ops.gemm.fp4.adapter import Activations, Fp4GemmAdapter, Weights
from kernelhub.ops.gemm.fp4.problem import GROUP, NVFP4, Fp4GemmProblem
from kernelhub.ops.packed import PackedWeight, PackingAdapter, Tensors


class VllmFp4(Fp4GemmAdapter, PackingAdapter):
    """Scales of a are brought into order in each call, those of b where it is not packed."""

    def __init__(self, problem: Fp4GemmProblem) -> None:
        super().__init__(problem)
        capability = problem.device.capability
        supports(VLLM, "cutlass_scaled_mm_supports_fp4", capability)
        self._multiply = operator(VLLM, "cutlass_scaled_fp4_mm", capability)
        self._packed = problem.weight_layout != CHECKPOINT

    def launch(self, a: Activations, b: Weights, bias: Tensor | None, out: Tensor) -> None:
        assert a.scale is not None
        assert a.global_scale is not None
        assert b.global_scale is not None
        alpha = a.global_scale.reshape(1) * b.global_scale.reshape(1)
        of_b = b.scale if self._packed else _tiled(b.scale)
        direct = is_row_major(out)
        made = row_major(out) if direct else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        self._multiply(made, row_major(a.codes), row_major(b.codes), _tiled(a.scale), of_b, alpha)
        if not direct:
            out.copy_(made)

    def pack(self, *weight: Tensor | None) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        """Codes row after row, and scales in tiles."""
        codes, scale, global_scale = weight
        assert codes is not None
        assert scale is not None
        tensors = {"codes": row_major(codes.view(torch.uint8)), "scale": _tiled(scale), "global_scale": global_scale}
        return tensors, unpack


def unpack(packed: PackedWeight) -> Tensors:
    """The inverse of `pack`: codes, scale and global scale."""
    codes, scale = packed.tensors["codes"], packed.tensors["scale"]
    assert codes is not None
    assert scale is not None
    n, half = packed.shape
    made = untiled(scale.view(torch.uint8), n, half * 2 // GROUP[NVFP4])
    return codes.view(packed.dtype), made.view(scale.dtype), packed.tensors["global_scale"]


def _tiled(scale: Tensor) -> Tensor:
    """Scales in tiles, of their own dtype, which the operator checks."""
    return tiled(scale).view(scale.dtype)
