"""`fused_moe` of NVFP4 weights by NVFP4 activations (opt-in), by the library's CUTLASS kernels.

Gate, up and the result of the activation are rounded to the dtype of the tokens before the library quantises them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flashinfer.fused_moe.core import cutlass_fused_moe_workspace_size
from torch import Tensor

from kernelhub.backends.flashinfer.moe.codes.tokens import as_nvfp4
from kernelhub.backends.flashinfer.moe.experts import Experts, swapped
from kernelhub.backends.shared.operands import row_major
from kernelhub.backends.shared.scales import tiled, untiled
from kernelhub.ops.formats import E4M3
from kernelhub.ops.moe.experts.adapter import W13, Values
from kernelhub.ops.moe.experts.problem import NVFP4
from kernelhub.ops.moe.experts.weights import FP4_GROUP, Matrix, matrix
from kernelhub.ops.packed import PackedWeight, Tensors

_WIDE, _FEW = 128, 4  # of the layer that loads the module


class ExpertsNvfp4(Experts):
    """Up before gate, scales in tiles of 128 rows by 4 groups; 16 codes are given as an int64, 4 scales as an int32."""

    weight_dtype = torch.int64

    def arrange(self, w13: Matrix, w2: Matrix) -> tuple[Matrix, Matrix]:
        return w13, w2

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        assert scale is not None
        codes, ordered = (item.view(torch.uint8) for item in (weight, scale))
        if side == W13:
            codes, ordered = swapped(codes), swapped(ordered)
        tensors: dict[str, Tensor | None] = {
            "weight": row_major(codes),
            "scale": tiled(ordered.flatten(0, 1)).view(ordered.shape),
            "global_scale": global_scale,
            "bias": None,
        }
        return tensors, unpack

    def launch(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
    ) -> None:
        first, second = (side._replace(weight=row_major(side.weight).view(torch.int64)) for side in (w13, w2))
        super().launch(x, first, second, topk_weights, topk_ids, values, out)

    def workspace_bytes(self, num_tokens: int) -> int:
        """As the library has it; tokens in float32 and as codes, one after the other; choices and a result."""
        problem = self.problem
        size = cutlass_fused_moe_workspace_size(
            num_tokens,
            problem.hidden_size,
            problem.intermediate_size,
            problem.num_experts,
            problem.top_k,
            x_dtype=torch.uint8,
            weight_dtype=self.weight_dtype,
            output_dtype=self._dtype,
            use_fused_finalize=False,
            device=torch.device(problem.device.type),
        )
        return int(size) + num_tokens * (28 * problem.hidden_size + 16 * problem.top_k * (1 + problem.top_k))

    def _given(self, x: Tensor, values: Values) -> tuple[Tensor, dict[str, Any]]:
        assert values.a1_scale is not None
        codes, scale = as_nvfp4(x, values.a1_scale)
        return codes, {"input_sf": row_major(scale.view(torch.uint8)), "swizzled_input_sf": False}

    def _scales(self, w13: Matrix, w2: Matrix, values: Values) -> list[Tensor]:
        assert w13.scale is not None
        assert w2.scale is not None
        assert w13.channel_scale is not None
        assert w2.channel_scale is not None
        assert values.a1_scale is not None
        assert values.a2_scale is not None
        a1, a2 = values.a1_scale.reshape(()), values.a2_scale.reshape(())
        first, second = (row_major(scale).view(torch.int32) for scale in (w13.scale, w2.scale))
        both = (w13.channel_scale[:, 0] * a1, w2.channel_scale[:, 0] * a2)
        return [a1.reciprocal(), first, both[0], a2.reciprocal(), second, both[1]]

    def _load(self) -> None:
        """Run a layer of few and small experts."""

        def zeros(rows: int) -> Matrix:
            codes = torch.zeros(_FEW, rows, _WIDE // 2, dtype=torch.uint8, device="cuda")
            scale = codes.new_zeros(_FEW, rows, _WIDE // FP4_GROUP[NVFP4])
            return matrix(NVFP4, codes, scale, torch.ones(_FEW, dtype=torch.float32, device="cuda"), None)

        one = torch.ones((), dtype=torch.float32, device="cuda")
        ids = torch.zeros(1, self.problem.top_k, dtype=torch.int32, device="cuda")
        x = torch.zeros(1, _WIDE, dtype=self._dtype, device="cuda")
        self.launch(x, zeros(2 * _WIDE), zeros(_WIDE), ids.float(), ids, Values(one, one), torch.empty_like(x))


def unpack(packed: PackedWeight) -> Tensors:
    """Weight, scale, global scale and bias as `pack` was given them."""
    codes, tiles = packed.tensors["weight"], packed.tensors["scale"]
    assert codes is not None
    assert tiles is not None
    flat = tiles.flatten(0, 1)
    scale = untiled(flat, *flat.shape).view(tiles.shape)
    if packed.facts["side"] == W13:
        codes, scale = swapped(codes), swapped(scale)
    return codes.view(packed.dtype), scale.view(E4M3), packed.tensors["global_scale"], None
