"""`fused_moe` of NVFP4 weights by NVFP4 activations (opt-in), by TensorRT-LLM's kernels.

Sums are multiplied by a number for each expert: gate by its weights' and the tokens' second scales, up by that over the
second scale of what joins them, which is quantised from float32; the down projection by its own two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from flashinfer.fused_moe.core import trtllm_fp4_block_scale_routed_moe
from torch import Tensor

from kernelhub.backends.flashinfer.moe.codes.tokens import as_nvfp4
from kernelhub.backends.flashinfer.moe.layouts import each, in_turn, one_after_the_other, shuffled, unshuffled
from kernelhub.backends.flashinfer.moe.trtllm import FEW, RENORMALIZE, SMALLEST, TrtllmExperts
from kernelhub.backends.shared.operands import row_major
from kernelhub.backends.shared.scales import tiled, untiled
from kernelhub.ops.formats import E4M3
from kernelhub.ops.moe.experts.adapter import W13, Values
from kernelhub.ops.moe.experts.problem import NVFP4
from kernelhub.ops.moe.experts.weights import FP4_GROUP, Matrix, matrix
from kernelhub.ops.packed import PackedWeight, Tensors


class TrtllmNvfp4(TrtllmExperts):
    """Codes [E, N, K / 2] with rows shuffled, scales in tiles of 128 rows by 4 groups."""

    most_tile = 256

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        assert scale is not None

        def moved(rows: Tensor) -> Tensor:
            return shuffled(in_turn(rows) if side == W13 else rows)

        second = moved(scale.view(torch.uint8))
        tensors: dict[str, Tensor | None] = {
            "weight": each(moved, weight.view(torch.uint8)),
            "scale": tiled(second.flatten(0, 1)).view(second.shape),
            "global_scale": global_scale,
            "bias": None,
        }
        return tensors, unpack

    def run(
        self, x: Tensor, w13: Matrix, w2: Matrix, choices: tuple[Tensor, Tensor], values: Values, out: Tensor
    ) -> None:
        assert w13.scale is not None
        assert w2.scale is not None
        assert w13.channel_scale is not None
        assert w2.channel_scale is not None
        assert values.a1_scale is not None
        assert values.a2_scale is not None
        a1, a2 = values.a1_scale.reshape(1), values.a2_scale.reshape(1)
        codes, scale = as_nvfp4(x, a1)
        gate = w13.channel_scale[:, 0] * a1
        trtllm_fp4_block_scale_routed_moe(
            choices,
            None,
            codes,
            scale,
            row_major(w13.weight),
            row_major(w13.scale).view(E4M3),
            None,
            None,
            None,
            None,
            row_major(w2.weight),
            row_major(w2.scale).view(E4M3),
            None,
            gate / a2,
            gate,
            w2.channel_scale[:, 0] * a2,
            *self._sizes(w13),
            RENORMALIZE,
            output=out,
        )

    def workspace_bytes(self, num_tokens: int) -> int:
        """With tokens in float32 and as codes, one after the other, and the result of the activation."""
        return super().workspace_bytes(num_tokens) + 24 * num_tokens * self._width

    def of_zeros(self, side: str, rows: int) -> Matrix:
        codes = torch.zeros(FEW, rows, SMALLEST // 2, dtype=torch.uint8, device="cuda")
        scale = codes.new_zeros(FEW, rows, SMALLEST // FP4_GROUP[NVFP4])
        return matrix(NVFP4, codes, scale, torch.ones(FEW, dtype=torch.float32, device="cuda"), None)


def unpack(packed: PackedWeight) -> Tensors:
    """Weight, scale, global scale and bias as `pack` was given them."""
    codes, tiles = packed.tensors["weight"], packed.tensors["scale"]
    assert codes is not None
    assert tiles is not None
    flat = tiles.flatten(0, 1)

    def back(rows: Tensor) -> Tensor:
        given = unshuffled(rows)
        return one_after_the_other(given) if packed.facts["side"] == W13 else given

    scale = back(untiled(flat, *flat.shape).view(tiles.shape)).contiguous().view(E4M3)
    return each(back, codes).view(packed.dtype), scale, packed.tensors["global_scale"], None
