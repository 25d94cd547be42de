"""`fused_moe` of MXFP4 weights by bfloat16 tokens, with biases and clamps (gpt-oss), by TensorRT-LLM's kernels.

They need widths that are multiples of 256. Packing pads weights with zeros, and each call pads tokens; the library
cuts results to the width of what it is given for them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from flashinfer.fused_moe.core import trtllm_fp4_block_scale_routed_moe
from torch import Tensor
from torch.nn.functional import pad

from kernelhub.backends.flashinfer.moe.layouts import each, in_turn, one_after_the_other, shuffled, unshuffled
from kernelhub.backends.flashinfer.moe.padding import Padded, cut, padded, up_to
from kernelhub.backends.flashinfer.moe.trtllm import RENORMALIZE, TrtllmExperts
from kernelhub.backends.shared.operands import row_major
from kernelhub.backends.shared.scales import tiled, untiled
from kernelhub.ops.formats import E4M3
from kernelhub.ops.moe.experts.adapter import W13, Values
from kernelhub.ops.moe.experts.problem import SWIGLU_OAI
from kernelhub.ops.moe.experts.weights import Matrix
from kernelhub.ops.packed import PackedWeight, Tensors

WIDE = 256


class TrtllmMxfp4(TrtllmExperts):
    """Codes [E, N, K / 2] with rows shuffled, scales in tiles of 128 rows by 4 groups, float32 biases."""

    most_tile = 64

    @property
    def _width(self) -> int:
        return up_to(self.problem.hidden_size, WIDE)

    @property
    def _inner_width(self) -> int:
        return up_to(self.problem.intermediate_size, WIDE)

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        assert scale is not None
        made = padded(side, weight, scale, bias, WIDE)

        def moved(rows: Tensor) -> Tensor:
            return shuffled(in_turn(rows) if side == W13 else rows)

        exponents = moved(made.scale)
        tensors: dict[str, Tensor | None] = {
            "weight": each(moved, made.codes),
            "scale": tiled(exponents.flatten(0, 1)).view(exponents.shape),
            "global_scale": None,
            "bias": None if made.bias is None else row_major(moved(made.bias.float())),
        }
        return tensors, unpack

    def run(
        self, x: Tensor, w13: Matrix, w2: Matrix, choices: tuple[Tensor, Tensor], values: Values, out: Tensor
    ) -> None:
        assert w13.scale is not None
        assert w2.scale is not None
        missing = self._width - x.shape[1]
        tokens, scale = self._given(pad(x, (0, missing)) if missing else x)
        trtllm_fp4_block_scale_routed_moe(
            choices,
            None,
            tokens,
            scale,
            row_major(w13.weight),
            row_major(w13.scale).view(E4M3),  # bytes of e8m0, which the library recognises by their number
            None if w13.bias is None else row_major(w13.bias),
            *self._clamp(x, w13.weight.shape[0], values),
            row_major(w2.weight),
            row_major(w2.scale).view(E4M3),
            None if w2.bias is None else row_major(w2.bias),
            None,
            None,
            None,
            *self._sizes(w13),
            RENORMALIZE,
            output=out,
        )

    def _given(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens as they are multiplied, and the scales of those that are quantised."""
        return x, None

    def _clamp(self, x: Tensor, experts: int, values: Values) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The activation's alpha, what is added to up, and the limit, each for every expert."""
        if self.problem.activation != SWIGLU_OAI:
            return None, None, None
        numbers = (values.alpha, 1.0, values.limit)
        alpha, one, limit = (torch.full((experts,), of, dtype=torch.float32, device=x.device) for of in numbers)
        return alpha, one, limit


def unpack(packed: PackedWeight) -> Tensors:
    """Weight, scale, global scale and bias as `pack` was given them."""
    codes, tiles, bias = (packed.tensors[name] for name in ("weight", "scale", "bias"))
    assert codes is not None
    assert tiles is not None
    flat = tiles.flatten(0, 1)
    exponents = untiled(flat, *flat.shape).view(tiles.shape)

    def back(shuffled_rows: Tensor) -> Tensor:
        rows = unshuffled(shuffled_rows)
        return one_after_the_other(rows) if packed.facts["side"] == W13 else rows

    return cut(packed, Padded(each(back, codes), back(exponents), None if bias is None else back(bias)))
