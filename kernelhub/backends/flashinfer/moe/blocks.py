"""`fused_moe` of float8 weights in blocks of 128 x 128, in opt-in formats of activations.

Weights and scales have up before gate, scales are float32. CUTLASS's kernels for sm_90 (`fp8_block`) quantise bfloat16
tokens themselves, by reciprocals, and round gate, up and what joins them to bfloat16. TensorRT-LLM's
(`fp8_block_gate_up`) take tokens that are quantised, and write gate and up in float8 before they join them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flashinfer.fused_moe.core import cutlass_fused_moe_workspace_size, trtllm_fp8_block_scale_routed_moe
from torch import Tensor

from kernelhub.backends.flashinfer.gemm.operands import as_float32
from kernelhub.backends.flashinfer.moe.experts import Experts, swapped
from kernelhub.backends.flashinfer.moe.trtllm import FEW, RENORMALIZE, SMALLEST, TrtllmExperts
from kernelhub.backends.shared.operands import row_major
from kernelhub.ops.formats import E4M3_MAX, E8M0, to_e4m3, to_e8m0_up
from kernelhub.ops.moe.experts.activations import SMALLEST_AMAX
from kernelhub.ops.moe.experts.adapter import W13, Values
from kernelhub.ops.moe.experts.weights import BLOCK, Matrix
from kernelhub.ops.packed import PackedWeight, Tensors

_MAJOR_K, _DEEPSEEK = 0, 1  # flashinfer.tllm_enums.WeightLayout, Fp8QuantizationType


def packed_blocks(side: str, weight: Tensor, scale: Tensor) -> dict[str, Tensor | None]:
    """Up before gate, scales in float32."""
    wide = as_float32(scale)
    first = side == W13
    made, scales = (swapped(weight), swapped(wide)) if first else (row_major(weight), row_major(wide))
    return {"weight": made, "scale": scales, "global_scale": None, "bias": None}


class ExpertsBlocks(Experts):
    """By CUTLASS, which compiles products by nvcc as DeepGEMM does."""

    weight_dtype = torch.float8_e4m3fn

    def arrange(self, w13: Matrix, w2: Matrix) -> tuple[Matrix, Matrix]:
        return w13, w2

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        assert scale is not None
        return packed_blocks(side, weight, scale), unpack

    def workspace_bytes(self, num_tokens: int) -> int:
        """As the library has it; tokens, choices and a result without gaps."""
        problem = self.problem
        size = cutlass_fused_moe_workspace_size(
            num_tokens,
            problem.hidden_size,
            problem.intermediate_size,
            problem.num_experts,
            problem.top_k,
            x_dtype=torch.bfloat16,
            weight_dtype=self.weight_dtype,
            output_dtype=torch.bfloat16,
            use_fused_finalize=False,
            device=torch.device(problem.device.type),
            use_deepseek_fp8_block_scale=True,
        )
        return int(size) + num_tokens * (4 * problem.hidden_size + 16 * problem.top_k * (1 + problem.top_k))

    def _scales(self, w13: Matrix, w2: Matrix, values: Values) -> list[Tensor]:
        assert w13.scale is not None
        assert w2.scale is not None
        return [row_major(w13.scale), row_major(w2.scale)]

    def _more(self, w13: Matrix, w2: Matrix, values: Values) -> dict[str, Any]:
        return {"use_deepseek_fp8_block_scale": True}

    def _load(self) -> None:
        """Run a layer of zeros."""
        experts, ids = self.problem.num_experts, torch.zeros(1, self.problem.top_k, dtype=torch.int32, device="cuda")

        def matrix(rows: int) -> Matrix:
            codes = torch.zeros(experts, rows, BLOCK, dtype=self.weight_dtype, device="cuda")
            return Matrix(codes, torch.ones(experts, rows // BLOCK, 1, dtype=torch.float32, device="cuda"), None, None)

        x = torch.zeros(1, BLOCK, dtype=torch.bfloat16, device="cuda")
        self.launch(x, matrix(2 * BLOCK), matrix(BLOCK), ids.float(), ids, Values(), torch.empty_like(x))


class TrtllmBlocks(TrtllmExperts):
    """By TensorRT-LLM."""

    most_tile = 128

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        assert scale is not None
        return packed_blocks(side, weight, scale), unpack

    def run(
        self, x: Tensor, w13: Matrix, w2: Matrix, choices: tuple[Tensor, Tensor], values: Values, out: Tensor
    ) -> None:
        assert w13.scale is not None
        assert w2.scale is not None
        groups = x.float().unflatten(1, (-1, BLOCK))
        largest = groups.abs().amax(2, keepdim=True).clamp(min=SMALLEST_AMAX)
        factor = largest / torch.full_like(largest, E4M3_MAX)
        trtllm_fp8_block_scale_routed_moe(
            choices,
            None,
            to_e4m3(groups / factor).flatten(1),
            row_major(factor.squeeze(2).t()),
            row_major(w13.weight),
            row_major(w13.scale),
            row_major(w2.weight),
            row_major(w2.scale),
            *self._sizes(w13),
            RENORMALIZE,
            False,
            _MAJOR_K,
            output=out,
            fp8_quantization_type=_DEEPSEEK,
        )

    def of_zeros(self, side: str, rows: int) -> Matrix:
        codes = torch.zeros(FEW, rows, SMALLEST, dtype=torch.float8_e4m3fn, device="cuda")
        scale = torch.ones(FEW, rows // BLOCK, SMALLEST // BLOCK, dtype=torch.float32, device="cuda")
        return Matrix(codes, scale, None, None)


def unpack(packed: PackedWeight) -> Tensors:
    """Weight, scale, global scale and bias as `pack` was given them."""
    weight, scale = packed.tensors["weight"], packed.tensors["scale"]
    assert weight is not None
    assert scale is not None
    if packed.facts["side"] == W13:
        weight, scale = swapped(weight), swapped(scale)
    return weight, to_e8m0_up(scale) if packed.facts["scale"][0] is E8M0 else scale, None, None
