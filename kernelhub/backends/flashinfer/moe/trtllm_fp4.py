"""`fused_moe` of float4 weights by TensorRT-LLM's kernels: MXFP4 by bfloat16 or MXFP8, and NVFP4 by NVFP4.

Kernels of MXFP4 (gpt-oss: with biases and clamps) need widths that are multiples of 256. Packing pads weights with
zeros, and each call pads tokens; the library cuts results to the width of what it is given for them.

Products by MXFP8 and by NVFP4 are opt-in. The result of the activation is quantised from float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from flashinfer.fused_moe.core import trtllm_fp4_block_scale_routed_moe
from torch import Tensor
from torch.nn.functional import pad

from kernelhub.backends.flashinfer.moe.layouts import each, for_epilogue, from_epilogue, in_tiles, out_of_tiles
from kernelhub.backends.flashinfer.moe.operands import as_mxfp8, as_nvfp4, expert_scales, scales_of, static_scales
from kernelhub.backends.flashinfer.moe.padding import Padded, cut, padded
from kernelhub.backends.flashinfer.moe.trtllm import FEW, RENORMALIZE, SMALLEST, TrtllmExperts
from kernelhub.backends.shared.operands import row_major, up_to
from kernelhub.ops.formats import E4M3
from kernelhub.ops.moe.experts.adapter import Values
from kernelhub.ops.moe.experts.problem import NVFP4, SWIGLU_OAI
from kernelhub.ops.moe.experts.weights import FP4_GROUP, Matrix, matrix
from kernelhub.ops.packed import PackedWeight, Tensors

WIDE = 256
_Three = tuple[Tensor | None, Tensor | None, Tensor | None]
_NONE: _Three = (None, None, None)


class _TrtllmFp4(TrtllmExperts):
    """Codes [E, N, K / 2] with rows shuffled, scales in tiles of 128 rows by 4 groups."""

    def _call(
        self,
        choices: tuple[Tensor, Tensor],
        tokens: Tensor,
        scale: Tensor | None,
        w13: Matrix,
        w2: Matrix,
        out: Tensor,
        *,
        clamp: _Three = _NONE,
        factors: _Three = _NONE,
    ) -> None:
        """Call the library; `factors` are for each expert those of gate, of up and of the down projection."""
        first, second = scales_of(w13, w2)
        trtllm_fp4_block_scale_routed_moe(
            choices,
            None,
            tokens,
            scale,
            row_major(w13.weight),
            first.view(E4M3),  # as which the library takes all scales, bytes of e8m0, too: it looks at their number
            None if w13.bias is None else row_major(w13.bias),
            *clamp,
            row_major(w2.weight),
            second.view(E4M3),
            None if w2.bias is None else row_major(w2.bias),
            *factors,
            *self._sizes(w13),
            RENORMALIZE,
            output=out,
        )


class TrtllmMxfp4(_TrtllmFp4):
    """MXFP4 by bfloat16 tokens, with float32 biases."""

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
        tensors: dict[str, Tensor | None] = {
            "weight": each(partial(for_epilogue, side), made.codes),
            "scale": in_tiles(for_epilogue(side, made.scale)),
            "global_scale": None,
            "bias": None if made.bias is None else row_major(for_epilogue(side, made.bias.float())),
        }
        return tensors, self._unpack

    @staticmethod
    def _unpack(packed: PackedWeight) -> Tensors:
        codes, tiles, bias = (packed.tensors[name] for name in ("weight", "scale", "bias"))
        assert codes is not None
        assert tiles is not None
        back = partial(from_epilogue, packed.facts["side"])
        return cut(packed, Padded(each(back, codes), back(out_of_tiles(tiles)), None if bias is None else back(bias)))

    def run(
        self, x: Tensor, w13: Matrix, w2: Matrix, choices: tuple[Tensor, Tensor], values: Values, out: Tensor
    ) -> None:
        missing = self._width - x.shape[1]
        tokens, scale = self._given(pad(x, (0, missing)) if missing else x)
        clamp = self._clamp(x, w13.weight.shape[0], values)
        self._call(choices, tokens, scale, w13, w2, out, clamp=clamp)

    def _given(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens as they are multiplied, and the scales of those that are quantised."""
        return x, None

    def _clamp(self, x: Tensor, experts: int, values: Values) -> _Three:
        """The activation's alpha, what is added to up, and the limit, each for every expert."""
        if self.problem.activation != SWIGLU_OAI:
            return _NONE
        numbers = (values.alpha, 1.0, values.limit)
        alpha, one, limit = (torch.full((experts,), of, dtype=torch.float32, device=x.device) for of in numbers)
        return alpha, one, limit


class TrtllmMxfp8(TrtllmMxfp4):
    """MXFP4 by MXFP8. Tokens are filled up to whole 256 before they are quantised, with zeros, which stay."""

    most_tile = 256
    token_bytes = 30  # with tokens in float32 and as codes, one after the other

    def _given(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        codes, powers = as_mxfp8(x)
        return codes, powers.view(E4M3)


class TrtllmNvfp4(_TrtllmFp4):
    """NVFP4 by NVFP4.

    Sums are multiplied by a number for each expert: gate by its weights' and the tokens' second scales, up by that over
    the second scale of what joins them; the down projection by its own two.
    """

    most_tile = 256
    token_bytes = 30  # with tokens in float32 and as codes, one after the other

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        assert scale is not None
        tensors: dict[str, Tensor | None] = {
            "weight": each(partial(for_epilogue, side), weight.view(torch.uint8)),
            "scale": in_tiles(for_epilogue(side, scale.view(torch.uint8))),
            "global_scale": global_scale,
            "bias": None,
        }
        return tensors, self._unpack

    @staticmethod
    def _unpack(packed: PackedWeight) -> Tensors:
        codes, tiles = packed.tensors["weight"], packed.tensors["scale"]
        assert codes is not None
        assert tiles is not None
        back = partial(from_epilogue, packed.facts["side"])
        scale = back(out_of_tiles(tiles)).contiguous().view(E4M3)
        return each(back, codes).view(packed.dtype), scale, packed.tensors["global_scale"], None

    def run(
        self, x: Tensor, w13: Matrix, w2: Matrix, choices: tuple[Tensor, Tensor], values: Values, out: Tensor
    ) -> None:
        a1, a2 = static_scales(values, 1)
        codes, scale = as_nvfp4(x, a1)
        first, second = expert_scales(w13, w2)
        gate = first * a1
        self._call(choices, codes, scale, w13, w2, out, factors=(gate / a2, gate, second * a2))

    def of_zeros(self, side: str, rows: int) -> Matrix:
        codes = torch.zeros(FEW, rows, SMALLEST // 2, dtype=torch.uint8, device="cuda")
        scale = codes.new_zeros(FEW, rows, SMALLEST // FP4_GROUP[NVFP4])
        return matrix(NVFP4, codes, scale, torch.ones(FEW, dtype=torch.float32, device="cuda"), None)
