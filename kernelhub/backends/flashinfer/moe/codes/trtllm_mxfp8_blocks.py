"""`fused_moe` of float8 blocks with UE8M0 scales by MXFP8 activations (opt-in), by TensorRT-LLM's kernels.

They take MXFP8 weights, so a block's scale is packed once for each of its 128 rows and 4 groups of 32 columns. What
joins gate and up is quantised from float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from flashinfer.fused_moe.core import trtllm_fp8_block_scale_routed_moe
from torch import Tensor

from kernelhub.backends.flashinfer.moe.codes.tokens import as_mxfp8
from kernelhub.backends.flashinfer.moe.layouts import each, in_turn, one_after_the_other, shuffled, unshuffled
from kernelhub.backends.flashinfer.moe.trtllm import FEW, RENORMALIZE, SMALLEST, TrtllmExperts
from kernelhub.backends.shared.operands import row_major
from kernelhub.backends.shared.scales import tiled, untiled
from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.moe.experts.activations import MX_GROUP
from kernelhub.ops.moe.experts.adapter import W13, Values
from kernelhub.ops.moe.experts.weights import BLOCK, Matrix
from kernelhub.ops.packed import PackedWeight, Tensors

_MAJOR_K, _MXFP8 = 0, 2  # flashinfer.tllm_enums.WeightLayout, Fp8QuantizationType
_GROUPS = BLOCK // MX_GROUP


class TrtllmMxfp8Blocks(TrtllmExperts):
    """Codes [E, N, K] with rows shuffled, scales of 32 columns in tiles of 128 rows by 4 groups."""

    most_tile = 256

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        assert scale is not None

        def moved(rows: Tensor) -> Tensor:
            return shuffled(in_turn(rows) if side == W13 else rows)

        spread = scale.view(torch.uint8).repeat_interleave(BLOCK, 1).repeat_interleave(_GROUPS, 2)
        powers = moved(spread)
        tensors: dict[str, Tensor | None] = {
            "weight": each(moved, weight.view(torch.uint8)).view(weight.dtype),
            "scale": tiled(powers.flatten(0, 1)).view(powers.shape),
            "global_scale": None,
            "bias": None,
        }
        return tensors, unpack

    def run(
        self, x: Tensor, w13: Matrix, w2: Matrix, choices: tuple[Tensor, Tensor], values: Values, out: Tensor
    ) -> None:
        assert w13.scale is not None
        assert w2.scale is not None
        codes, powers = as_mxfp8(x)
        trtllm_fp8_block_scale_routed_moe(
            choices,
            None,
            codes,
            row_major(powers),
            row_major(w13.weight),
            row_major(w13.scale),
            row_major(w2.weight),
            row_major(w2.scale),
            *self._sizes(w13),
            RENORMALIZE,
            True,
            _MAJOR_K,
            output=out,
            fp8_quantization_type=_MXFP8,
        )

    def workspace_bytes(self, num_tokens: int) -> int:
        """With tokens in float32 and as codes, one after the other."""
        return super().workspace_bytes(num_tokens) + 24 * num_tokens * self._width

    def of_zeros(self, side: str, rows: int) -> Matrix:
        codes = torch.zeros(FEW, rows, SMALLEST, dtype=E4M3, device="cuda")
        powers = torch.zeros(FEW, rows, SMALLEST // MX_GROUP, dtype=torch.uint8, device="cuda")
        return Matrix(codes, powers, None, None)


def unpack(packed: PackedWeight) -> Tensors:
    """Weight, scale, global scale and bias as `pack` was given them."""
    codes, tiles = packed.tensors["weight"], packed.tensors["scale"]
    assert codes is not None
    assert tiles is not None
    flat = tiles.flatten(0, 1)

    def back(rows: Tensor) -> Tensor:
        given = unshuffled(rows)
        return one_after_the_other(given) if packed.facts["side"] == W13 else given

    spread = back(untiled(flat, *flat.shape).view(tiles.shape))
    scale = spread[:, ::BLOCK, ::_GROUPS].contiguous().view(E8M0)
    return each(back, codes.view(torch.uint8)).view(packed.dtype), scale, None, None
