"""`fused_moe` of bfloat16 weights by TensorRT-LLM's kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from flashinfer.fused_moe.core import trtllm_bf16_routed_moe
from torch import Tensor

from kernelhub.backends.flashinfer.moe.layouts import (
    each,
    in_blocks,
    in_turn,
    one_after_the_other,
    out_of_blocks,
    shuffled,
    unshuffled,
)
from kernelhub.backends.flashinfer.moe.trtllm import RENORMALIZE, TrtllmExperts
from kernelhub.backends.shared.operands import row_major
from kernelhub.ops.moe.experts.adapter import W13, Values
from kernelhub.ops.moe.experts.weights import Matrix
from kernelhub.ops.packed import PackedWeight, Tensors

_BLOCK_MAJOR_K = 2  # flashinfer.tllm_enums.WeightLayout


class TrtllmBf16(TrtllmExperts):
    """Weights [E, K / 64, N, 64], rows shuffled."""

    most_tile = 128

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        def moved(expert: Tensor) -> Tensor:
            raw = expert.contiguous().view(torch.uint8)
            return in_blocks(shuffled(in_turn(raw) if side == W13 else raw))

        made = each(moved, weight).view(torch.bfloat16)
        return {"weight": made, "scale": None, "global_scale": None, "bias": None}, unpack

    def run(
        self, x: Tensor, w13: Matrix, w2: Matrix, choices: tuple[Tensor, Tensor], values: Values, out: Tensor
    ) -> None:
        trtllm_bf16_routed_moe(
            choices,
            x,
            row_major(w13.weight),
            row_major(w2.weight),
            *self._sizes(w13),
            RENORMALIZE,
            True,
            _BLOCK_MAJOR_K,
            output=out,
        )


def unpack(packed: PackedWeight) -> Tensors:
    """Weight, scale, global scale and bias as `pack` was given them."""
    blocks = packed.tensors["weight"]
    assert blocks is not None

    def back(expert: Tensor) -> Tensor:
        rows = unshuffled(out_of_blocks(expert))
        return one_after_the_other(rows) if packed.facts["side"] == W13 else rows

    return each(back, blocks.view(torch.uint8)).view(packed.dtype), None, None, None
