"""`fp4_gemm` of NVFP4 by NVFP4.

Scales are read in tiles (see `operands.tiled`). Those of the weight are brought there by `pack`, or at each call, and
those of the activations at each call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from flashinfer.gemm.gemm_base import mm_fp4
from torch import Tensor

from kernelhub.backends.flashinfer.gemm.operands import TILE_GROUPS, TILE_ROWS, lies_whole, tiled, whole
from kernelhub.backends.flashinfer.planning import device_of
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.ops.formats import E4M3
from kernelhub.ops.gemm.fp4.adapter import Activations, Fp4GemmAdapter, Weights
from kernelhub.ops.gemm.fp4.problem import GROUP, NVFP4, Fp4GemmProblem
from kernelhub.ops.packed import PackedWeight, PackingAdapter, Tensors

_SMALLEST = 256  # N and K of the product by which the module is loaded


class Fp4Cutlass(Fp4GemmAdapter, PackingAdapter):
    """CUTLASS on Blackwell."""

    def __init__(self, problem: Fp4GemmProblem) -> None:
        super().__init__(problem)
        self._packed = problem.weight_layout != CHECKPOINT
        if problem.device.type == "cuda":  # loads the module, or compiles it: what it lacks is told now
            codes = torch.zeros(_SMALLEST, _SMALLEST // 2, dtype=torch.uint8, device="cuda")
            scale = torch.zeros(_SMALLEST, _SMALLEST // GROUP[NVFP4], dtype=E4M3, device="cuda")
            one = torch.ones(1, device="cuda")
            out = torch.empty(_SMALLEST, _SMALLEST, dtype=getattr(torch, problem.out_dtype), device="cuda")
            weight = self.pack(codes, scale, one)[0]["scale"] if self._packed else scale
            assert weight is not None
            self.launch(Activations(codes, scale, one), Weights(codes, weight, one), None, out)

    def pack(self, *weight: Tensor | None) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        codes, scale, global_scale = weight
        assert codes is not None
        assert scale is not None
        return {"codes": whole(codes.view(torch.uint8)), "scale": tiled(scale), "global_scale": global_scale}, unpack

    def launch(self, a: Activations, b: Weights, bias: Tensor | None, out: Tensor) -> None:
        assert a.scale is not None
        assert a.global_scale is not None
        assert b.global_scale is not None
        scale = b.scale if self._packed else tiled(b.scale)
        alpha = a.global_scale.reshape(1) * b.global_scale.reshape(1)
        direct = lies_whole(out)
        made = whole(out) if direct else out.new_empty(out.shape)
        with device_of(out):
            mm_fp4(
                whole(a.codes),
                whole(b.codes).t(),
                tiled(a.scale),
                scale.t(),
                alpha,
                out.dtype,
                made,
                GROUP[NVFP4],
                False,
                "cutlass",
                True,
            )
        if not direct:
            out.copy_(made)


def unpack(packed: PackedWeight) -> Tensors:
    """Codes, scale and global scale as `pack` was given them."""
    codes, scale = packed.tensors["codes"], packed.tensors["scale"]
    assert codes is not None
    assert scale is not None
    rows, groups = packed.shape[0], packed.shape[1] * 2 // GROUP[NVFP4]
    high, wide = scale.shape[0] // TILE_ROWS, scale.shape[1] // TILE_GROUPS
    plain = scale.view(high, wide, 32, 4, TILE_GROUPS).permute(0, 3, 2, 1, 4).reshape(scale.shape)
    scales = plain[:rows, :groups].contiguous().view(packed.facts["scale_dtype"])
    return codes.view(packed.dtype), scales, packed.tensors["global_scale"]
