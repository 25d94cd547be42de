"""`fused_moe` of MXINT4 weights by bfloat16 tokens, by TensorRT-LLM's kernels.

The library takes a routing for such weights in one form alone: an id and a bfloat16 weight in one number, which is
within what a result may be off (`kernelhub.ops.moe.experts.tolerance`), as what an expert adds may be rounded, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from flashinfer.fused_moe.core import trtllm_mxint4_block_scale_routed_moe
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
from kernelhub.backends.shared.scales import tiled, untiled
from kernelhub.ops.moe.experts.adapter import W13, Values
from kernelhub.ops.moe.experts.weights import Matrix
from kernelhub.ops.packed import PackedWeight, Tensors


class TrtllmMxint4(TrtllmExperts):
    """Codes [E, K / 256, N, 128] and bfloat16 scales in tiles of 128 rows by 4 groups, rows shuffled."""

    most_tile = 128

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        assert scale is not None

        def moved(rows: Tensor) -> Tensor:
            return shuffled(in_turn(rows) if side == W13 else rows)

        factors = moved(scale)
        tensors: dict[str, Tensor | None] = {
            "weight": each(lambda codes: in_blocks(moved(codes)), weight),
            "scale": tiled(factors.flatten(0, 1)).view(factors.shape),
            "global_scale": None,
            "bias": None,
        }
        return tensors, unpack

    def run(
        self, x: Tensor, w13: Matrix, w2: Matrix, choices: tuple[Tensor, Tensor], values: Values, out: Tensor
    ) -> None:
        assert w13.scale is not None
        assert w2.scale is not None
        trtllm_mxint4_block_scale_routed_moe(
            in_one_number(*choices),
            x,
            row_major(w13.weight),
            row_major(w13.scale),
            None,
            None,
            None,
            row_major(w2.weight),
            row_major(w2.scale),
            *self._sizes(w13),
            RENORMALIZE,
            output=out,
        )


def in_one_number(ids: Tensor, weights: Tensor) -> Tensor:
    """int32 [T, top_k]: the id above, below it the bits of the weight in bfloat16."""
    bits = weights.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF
    return ids << 16 | bits


def unpack(packed: PackedWeight) -> Tensors:
    """Weight, scale, global scale and bias as `pack` was given them."""
    blocks, tiles = packed.tensors["weight"], packed.tensors["scale"]
    assert blocks is not None
    assert tiles is not None
    flat = tiles.flatten(0, 1)
    factors = untiled(flat, *flat.shape).view(tiles.shape)

    def back(shuffled_rows: Tensor) -> Tensor:
        rows = unshuffled(shuffled_rows)
        return one_after_the_other(rows) if packed.facts["side"] == W13 else rows

    return each(lambda codes: back(out_of_blocks(codes)), blocks), back(factors), None, None
