"""`fused_moe` of MXFP4 weights by MXFP8 activations (opt-in), by the library's CUTLASS kernels.

Gate, up and the result of the activation are rounded to bfloat16 before the library quantises them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.flashinfer.moe.codes.tokens import as_mxfp8
from kernelhub.backends.flashinfer.moe.experts import swapped
from kernelhub.backends.flashinfer.moe.experts_mxfp4 import WIDE, ExpertsMxfp4, as_bfloat16
from kernelhub.backends.flashinfer.moe.padding import Padded, cut, padded, up_to
from kernelhub.backends.shared.operands import row_major
from kernelhub.backends.shared.scales import tiled, untiled
from kernelhub.ops.formats import E4M3
from kernelhub.ops.moe.experts.adapter import W13, Values
from kernelhub.ops.moe.experts.weights import Matrix
from kernelhub.ops.packed import PackedWeight, Tensors


class ExpertsMxfp8(ExpertsMxfp4):
    """Up before gate, scales in tiles of 128 rows by 4 groups; 16 codes are given as an int64, 4 scales as an int32."""

    weight_dtype = torch.int64
    way = "use_mxfp8_act_scaling"

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        assert scale is not None
        made = padded(side, weight, scale, as_bfloat16(side, bias), WIDE)

        def moved(rows: Tensor) -> Tensor:
            return swapped(rows) if side == W13 else row_major(rows)

        ordered = moved(made.scale)
        tensors: dict[str, Tensor | None] = {
            "weight": moved(made.codes),
            "scale": tiled(ordered.flatten(0, 1)).view(ordered.shape),
            "global_scale": None,
            "bias": None if made.bias is None else moved(made.bias),
        }
        return tensors, unpack

    def launch(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
    ) -> None:
        first, second = (side._replace(weight=row_major(side.weight).view(torch.int64)) for side in (w13, w2))
        super().launch(x, first, second, topk_weights, topk_ids, values, out)

    def workspace_bytes(self, num_tokens: int) -> int:
        """With tokens in float32 and as codes, one after the other."""
        return super().workspace_bytes(num_tokens) + 24 * num_tokens * up_to(self.problem.hidden_size, WIDE)

    @property
    def _x_dtype(self) -> torch.dtype:
        return E4M3

    def _given(self, x: Tensor, values: Values) -> tuple[Tensor, dict[str, Any]]:
        codes, powers = as_mxfp8(self._tokens(x, values))
        return codes, {"input_sf": row_major(powers), "swizzled_input_sf": False}

    def _scales(self, w13: Matrix, w2: Matrix, values: Values) -> list[Tensor]:
        first, second = (scale.view(torch.int32) for scale in super()._scales(w13, w2, values))
        one = torch.ones(w13.weight.shape[0], dtype=torch.float32, device=first.device)  # MXFP4 has none
        return [first, one, second, one]


def unpack(packed: PackedWeight) -> Tensors:
    """Weight, scale, global scale and bias as `pack` was given them."""
    codes, tiles, bias = (packed.tensors[name] for name in ("weight", "scale", "bias"))
    assert codes is not None
    assert tiles is not None
    flat = tiles.flatten(0, 1)

    def back(rows: Tensor) -> Tensor:
        return swapped(rows) if packed.facts["side"] == W13 else rows

    scale = back(untiled(flat, *flat.shape).view(tiles.shape))
    return cut(packed, Padded(back(codes), scale, None if bias is None else back(bias)))
