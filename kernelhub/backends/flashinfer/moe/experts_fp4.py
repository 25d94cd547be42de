"""`fused_moe` of float4 weights by the library's CUTLASS kernels: MXFP4 by bfloat16 on sm_90, by MXFP8, and NVFP4.

Kernels of MXFP4 need widths that are multiples of 128: packing pads weights with zeros, each call pads tokens and cuts
results. They add biases as bfloat16, so packing rejects a float32 bias that bfloat16 cannot represent.

Products by MXFP8 and by NVFP4 are opt-in: gate, up and the result of the activation are rounded to the dtype of the
tokens before the library quantises them. They take scales in tiles of 128 rows by 4 groups, 4 scales as an int32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernelhub.backends.flashinfer.moe.experts import Experts, up_first
from kernelhub.backends.flashinfer.moe.layouts import in_tiles, out_of_tiles
from kernelhub.backends.flashinfer.moe.mixed import deinterleaved, folded, interleaved, unfolded
from kernelhub.backends.flashinfer.moe.operands import as_mxfp8, as_nvfp4, expert_scales, scales_of, static_scales
from kernelhub.backends.flashinfer.moe.padding import ONE_E8M0, Padded, cut, padded
from kernelhub.backends.shared.operands import row_major, up_to
from kernelhub.ops.formats import E4M3
from kernelhub.ops.moe.experts.adapter import W2, W13, Values
from kernelhub.ops.moe.experts.checks import refuse
from kernelhub.ops.moe.experts.problem import NVFP4, SWIGLU_OAI
from kernelhub.ops.moe.experts.weights import FP4_GROUP, Matrix, matrix
from kernelhub.ops.packed import PackedWeight, Tensors

WIDE = 128
_FEW = 4  # experts of the layer that loads the module
_Moves = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]  # to the layout of the kernels, and back


class ExpertsMxfp4(Experts):
    """By bfloat16 tokens. Up before gate, codes interleaved, scales folded."""

    weight_dtype = torch.uint8
    options: ClassVar[dict[str, bool]] = {"use_w4_group_scaling": True}
    codes: ClassVar[_Moves] = (interleaved, deinterleaved)
    scales: ClassVar[_Moves] = (folded, unfolded)

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        assert scale is not None
        made = padded(side, weight, scale, _as_bfloat16(side, bias), WIDE)
        tensors: dict[str, Tensor | None] = {
            "weight": self.codes[0](up_first(side, made.codes)),
            "scale": self.scales[0](up_first(side, made.scale)),
            "global_scale": None,
            "bias": None if made.bias is None else up_first(side, made.bias),
        }
        return tensors, self._unpack

    @classmethod
    def _unpack(cls, packed: PackedWeight) -> Tensors:
        codes, scale, bias = (packed.tensors[name] for name in ("weight", "scale", "bias"))
        assert codes is not None
        assert scale is not None
        side = packed.facts["side"]
        straight = Padded(
            up_first(side, cls.codes[1](codes)),
            up_first(side, cls.scales[1](scale)),
            None if bias is None else up_first(side, bias),
        )
        return cut(packed, straight)

    def workspace_bytes(self, num_tokens: int) -> int:
        """With tokens, choices and a result, filled up."""
        return super().workspace_bytes(num_tokens) + 12 * 512

    @property
    def _widths(self) -> tuple[int, int]:
        return up_to(self.problem.hidden_size, WIDE), up_to(self.problem.intermediate_size, WIDE)

    def _tokens(self, x: Tensor, values: Values) -> Tensor:
        missing = up_to(x.shape[1], WIDE) - x.shape[1]
        return pad(x, (0, missing)) if missing else x

    def _scales(self, w13: Matrix, w2: Matrix, values: Values) -> list[Tensor]:
        return [*scales_of(w13, w2)]

    def _more(self, w13: Matrix, w2: Matrix, values: Values) -> dict[str, Any]:
        given: dict[str, Any] = {
            "fc1_expert_biases": None if w13.bias is None else row_major(w13.bias),
            "fc2_expert_biases": None if w2.bias is None else row_major(w2.bias),
        }
        if self.problem.activation == SWIGLU_OAI:
            numbers = {"swiglu_alpha": values.alpha, "swiglu_beta": 1.0, "swiglu_limit": values.limit}
            shape, device = (w13.weight.shape[0],), w13.weight.device
            made = {name: torch.full(shape, of, dtype=torch.float32, device=device) for name, of in numbers.items()}
            given |= made
        return given

    def _load(self) -> None:
        """Run a layer of few and small experts."""
        matrices = {}
        for side, rows in ((W13, 2 * WIDE), (W2, WIDE)):
            codes = torch.zeros(_FEW, rows, WIDE // 2, dtype=torch.uint8, device="cuda")
            scale = codes.new_full((_FEW, rows, WIDE // FP4_GROUP["mxfp4"]), ONE_E8M0)
            tensors, _ = self.pack(
                side, codes, scale, None, torch.zeros(_FEW, rows, dtype=torch.float32, device="cuda")
            )
            weight = tensors["weight"]
            assert weight is not None
            matrices[side] = matrix("mxfp4", weight, tensors["scale"], None, tensors["bias"])
        ids = torch.zeros(1, self.problem.top_k, dtype=torch.int32, device="cuda")
        x = torch.zeros(1, WIDE, dtype=torch.bfloat16, device="cuda")
        self.launch(x, matrices[W13], matrices[W2], ids.float(), ids, Values(), torch.empty_like(x))


class ExpertsMxfp8(ExpertsMxfp4):
    """By MXFP8 activations."""

    weight_dtype = torch.int64
    options: ClassVar[dict[str, bool]] = {"use_mxfp8_act_scaling": True}
    token_bytes = 28  # with tokens in float32 and as codes, one after the other
    codes: ClassVar[_Moves] = (row_major, row_major)
    scales: ClassVar[_Moves] = (in_tiles, out_of_tiles)

    @property
    def _x_dtype(self) -> torch.dtype:
        return E4M3

    def _given(self, x: Tensor, values: Values) -> tuple[Tensor, dict[str, Any]]:
        codes, powers = as_mxfp8(self._tokens(x, values))
        return codes, {"input_sf": row_major(powers), "swizzled_input_sf": False}

    def _scales(self, w13: Matrix, w2: Matrix, values: Values) -> list[Tensor]:
        first, second = (scale.view(torch.int32) for scale in scales_of(w13, w2))
        one = torch.ones(w13.weight.shape[0], dtype=torch.float32, device=first.device)  # MXFP4 has none
        return [first, one, second, one]


class ExpertsNvfp4(Experts):
    """By NVFP4 activations. Up before gate."""

    weight_dtype = torch.int64
    token_bytes = 28  # with tokens in float32 and as codes, one after the other

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        assert scale is not None
        codes, ordered = (up_first(side, item.view(torch.uint8)) for item in (weight, scale))
        return {"weight": codes, "scale": in_tiles(ordered), "global_scale": global_scale, "bias": None}, self._unpack

    @staticmethod
    def _unpack(packed: PackedWeight) -> Tensors:
        codes, tiles = packed.tensors["weight"], packed.tensors["scale"]
        assert codes is not None
        assert tiles is not None
        codes, scale = (up_first(packed.facts["side"], item) for item in (codes, out_of_tiles(tiles)))
        return codes.view(packed.dtype), scale.view(E4M3), packed.tensors["global_scale"], None

    @property
    def _x_dtype(self) -> torch.dtype:
        return torch.uint8

    def _given(self, x: Tensor, values: Values) -> tuple[Tensor, dict[str, Any]]:
        assert values.a1_scale is not None
        codes, scale = as_nvfp4(x, values.a1_scale)
        return codes, {"input_sf": row_major(scale.view(torch.uint8)), "swizzled_input_sf": False}

    def _scales(self, w13: Matrix, w2: Matrix, values: Values) -> list[Tensor]:
        a1, a2 = static_scales(values)
        (first, second), (of_w13, of_w2) = scales_of(w13, w2), expert_scales(w13, w2)
        return [
            a1.reciprocal(),
            first.view(torch.int32),
            of_w13 * a1,
            a2.reciprocal(),
            second.view(torch.int32),
            of_w2 * a2,
        ]

    def _load(self) -> None:
        """Run a layer of few and small experts."""

        def zeros(rows: int) -> Matrix:
            codes = torch.zeros(_FEW, rows, WIDE // 2, dtype=torch.uint8, device="cuda")
            scale = codes.new_zeros(_FEW, rows, WIDE // FP4_GROUP[NVFP4])
            return matrix(NVFP4, codes, scale, torch.ones(_FEW, dtype=torch.float32, device="cuda"), None)

        one = torch.ones((), dtype=torch.float32, device="cuda")
        ids = torch.zeros(1, self.problem.top_k, dtype=torch.int32, device="cuda")
        x = torch.zeros(1, WIDE, dtype=self._dtype, device="cuda")
        self.launch(x, zeros(2 * WIDE), zeros(WIDE), ids.float(), ids, Values(one, one), torch.empty_like(x))


def _as_bfloat16(side: str, bias: Tensor | None) -> Tensor | None:
    """A bias as the library adds it, if that has the same numbers."""
    if bias is None:
        return None
    rounded = bias.bfloat16()
    if not torch.equal(rounded.to(bias.dtype), bias):
        refuse(
            f"{side}_bias", "has values that bfloat16 cannot represent", "give bfloat16, or prepare with another kernel"
        )
    return rounded
