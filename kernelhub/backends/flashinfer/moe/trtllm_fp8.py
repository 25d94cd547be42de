"""`fused_moe` of float8 weights with a scale for each expert, by tokens with a known scale, by TensorRT-LLM's kernels.

The result of the activation is quantised from the float32 sums, with the scale that `fused_moe` is given for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from flashinfer.fused_moe.core import trtllm_fp8_per_tensor_scale_routed_moe
from torch import Tensor

from kernelhub.backends.flashinfer.moe.layouts import each, in_turn, one_after_the_other, shuffled, unshuffled
from kernelhub.backends.flashinfer.moe.trtllm import RENORMALIZE, TrtllmExperts
from kernelhub.backends.shared.operands import row_major
from kernelhub.ops.formats import to_e4m3
from kernelhub.ops.moe.experts.adapter import W13, Values
from kernelhub.ops.moe.experts.weights import Matrix
from kernelhub.ops.packed import PackedWeight, Tensors


class TrtllmFp8(TrtllmExperts):
    """Weights [E, N, K], rows shuffled."""

    most_tile = 128

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        def moved(expert: Tensor) -> Tensor:
            return shuffled(in_turn(expert) if side == W13 else expert)

        made = each(moved, weight.view(torch.uint8)).view(weight.dtype)
        return {"weight": made, "scale": scale, "global_scale": None, "bias": None}, unpack

    def run(
        self, x: Tensor, w13: Matrix, w2: Matrix, choices: tuple[Tensor, Tensor], values: Values, out: Tensor
    ) -> None:
        assert w13.channel_scale is not None
        assert w2.channel_scale is not None
        assert values.a1_scale is not None
        assert values.a2_scale is not None
        a1, a2 = values.a1_scale.reshape(1), values.a2_scale.reshape(1)
        both = w13.channel_scale[:, 0] * a1
        trtllm_fp8_per_tensor_scale_routed_moe(
            choices,
            None,
            row_major(to_e4m3(x.float() / a1)),
            row_major(w13.weight),
            both / a2,
            both,
            row_major(w2.weight),
            w2.channel_scale[:, 0] * a2,
            *self._sizes(w13),
            False,
            RENORMALIZE,
            output=out,
        )


def unpack(packed: PackedWeight) -> Tensors:
    """Weight, scale, global scale and bias as `pack` was given them."""
    made = packed.tensors["weight"]
    assert made is not None

    def back(expert: Tensor) -> Tensor:
        rows = unshuffled(expert)
        return one_after_the_other(rows) if packed.facts["side"] == W13 else rows

    return each(back, made.view(torch.uint8)).view(packed.dtype), packed.tensors["scale"], None, None
