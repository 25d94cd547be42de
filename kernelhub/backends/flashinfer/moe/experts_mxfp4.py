"""`fused_moe` of MXFP4 weights by bfloat16 tokens on sm_90, by the library's CUTLASS kernels.

They need widths that are multiples of 128: packing pads weights with zeros, each call pads tokens and cuts results.
Biases are added as bfloat16, so packing rejects a float32 bias that bfloat16 cannot represent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flashinfer.fused_moe.core import cutlass_fused_moe_workspace_size
from torch import Tensor
from torch.nn.functional import pad

from kernelhub.backends.flashinfer.moe.experts import Experts, swapped
from kernelhub.backends.flashinfer.moe.mixed import deinterleaved, folded, interleaved, unfolded
from kernelhub.backends.flashinfer.moe.padding import ONE_E8M0, Padded, cut, padded, up_to
from kernelhub.backends.shared.operands import row_major
from kernelhub.ops.moe.experts.adapter import W2, W13, Values
from kernelhub.ops.moe.experts.checks import refuse
from kernelhub.ops.moe.experts.problem import SWIGLU_OAI
from kernelhub.ops.moe.experts.weights import FP4_GROUP, Matrix, matrix
from kernelhub.ops.packed import PackedWeight, Tensors

WIDE = 128
_FEW = 4  # experts of the layer that loads the module


class ExpertsMxfp4(Experts):
    """Up before gate, codes interleaved, scales folded."""

    weight_dtype = torch.uint8
    way = "use_w4_group_scaling"  # which of its ways to multiply float4 the library is to take

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        assert scale is not None
        made = padded(side, weight, scale, as_bfloat16(side, bias), WIDE)

        def moved(rows: Tensor) -> Tensor:
            return swapped(rows) if side == W13 else rows

        tensors: dict[str, Tensor | None] = {
            "weight": interleaved(moved(made.codes)),
            "scale": folded(moved(made.scale)),
            "global_scale": None,
            "bias": None if made.bias is None else row_major(moved(made.bias)),
        }
        return tensors, unpack

    def workspace_bytes(self, num_tokens: int) -> int:
        """As the library has it; tokens, choices and a result, filled up."""
        problem = self.problem
        hidden, inner = up_to(problem.hidden_size, WIDE), up_to(problem.intermediate_size, WIDE)
        size = cutlass_fused_moe_workspace_size(
            num_tokens,
            hidden,
            inner,
            problem.num_experts,
            problem.top_k,
            x_dtype=self._x_dtype,
            weight_dtype=self.weight_dtype,
            output_dtype=torch.bfloat16,
            use_fused_finalize=False,
            device=torch.device(problem.device.type),
            **{self.way: True},
        )
        return int(size) + num_tokens * (4 * hidden + 16 * problem.top_k * (1 + problem.top_k)) + 12 * 512

    def _tokens(self, x: Tensor, values: Values) -> Tensor:
        missing = up_to(x.shape[1], WIDE) - x.shape[1]
        return pad(x, (0, missing)) if missing else x

    def _scales(self, w13: Matrix, w2: Matrix, values: Values) -> list[Tensor]:
        assert w13.scale is not None
        assert w2.scale is not None
        return [row_major(w13.scale), row_major(w2.scale)]

    def _more(self, w13: Matrix, w2: Matrix, values: Values) -> dict[str, Any]:
        given: dict[str, Any] = {
            self.way: True,
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


def as_bfloat16(side: str, bias: Tensor | None) -> Tensor | None:
    """A bias as the library adds it, if that has the same numbers."""
    if bias is None:
        return None
    rounded = bias.bfloat16()
    if not torch.equal(rounded.to(bias.dtype), bias):
        refuse(
            f"{side}_bias", "has values that bfloat16 cannot represent", "give bfloat16, or prepare with another kernel"
        )
    return rounded


def unpack(packed: PackedWeight) -> Tensors:
    """Weight, scale, global scale and bias as `pack` was given them."""
    codes, blocks, bias = (packed.tensors[name] for name in ("weight", "scale", "bias"))
    assert codes is not None
    assert blocks is not None

    def back(rows: Tensor) -> Tensor:
        return swapped(rows) if packed.facts["side"] == W13 else rows

    made = Padded(back(deinterleaved(codes)), back(unfolded(blocks)), None if bias is None else back(bias))
    return cut(packed, made)
