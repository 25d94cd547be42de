"""`fused_moe` of float8 weights in blocks of 128 x 128, in opt-in formats of activations.

CUTLASS's kernels for sm_90 (`fp8_block`) quantise bfloat16 tokens themselves, by reciprocals, and round gate, up and
what joins them to bfloat16. TensorRT-LLM's (`fp8_block_gate_up`) take tokens that are quantised, and write gate and up
in float8 before they join them. For both, weights and scales have up before gate, and scales are float32.

TensorRT-LLM's kernels of MXFP8 (`mxfp8`) take UE8M0 scales of groups of 32 columns, so a block's scale is packed once
for each of its 128 rows and 4 groups. What joins gate and up is quantised from float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from flashinfer.fused_moe.core import trtllm_fp8_block_scale_routed_moe
from torch import Tensor

from kernelhub.backends.flashinfer.gemm.operands import as_float32
from kernelhub.backends.flashinfer.moe.experts import Experts, up_first
from kernelhub.backends.flashinfer.moe.layouts import each, for_epilogue, from_epilogue, in_tiles, out_of_tiles
from kernelhub.backends.flashinfer.moe.operands import as_mxfp8, scales_of
from kernelhub.backends.flashinfer.moe.trtllm import FEW, RENORMALIZE, SMALLEST, TrtllmExperts
from kernelhub.backends.shared.operands import row_major
from kernelhub.ops.formats import E4M3, E4M3_MAX, E8M0, to_e4m3, to_e8m0_up
from kernelhub.ops.moe.experts.activations import MX_GROUP, SMALLEST_AMAX
from kernelhub.ops.moe.experts.adapter import Values
from kernelhub.ops.moe.experts.weights import BLOCK, Matrix
from kernelhub.ops.packed import PackedWeight, Tensors

_MAJOR_K, _DEEPSEEK, _MXFP8 = 0, 1, 2  # flashinfer.tllm_enums.WeightLayout, Fp8QuantizationType
_GROUPS = BLOCK // MX_GROUP


class ExpertsBlocks(Experts):
    """By CUTLASS, which compiles products by nvcc as DeepGEMM does."""

    weight_dtype = E4M3
    options: ClassVar[dict[str, bool]] = {"use_deepseek_fp8_block_scale": True}

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        assert scale is not None
        return _packed(side, weight, scale), _unpack

    def _scales(self, w13: Matrix, w2: Matrix, values: Values) -> list[Tensor]:
        return [*scales_of(w13, w2)]

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
        return _packed(side, weight, scale), _unpack

    def run(
        self, x: Tensor, w13: Matrix, w2: Matrix, choices: tuple[Tensor, Tensor], values: Values, out: Tensor
    ) -> None:
        first, second = scales_of(w13, w2)
        groups = x.float().unflatten(1, (-1, BLOCK))
        largest = groups.abs().amax(2, keepdim=True).clamp(min=SMALLEST_AMAX)
        factor = largest / torch.full_like(largest, E4M3_MAX)
        trtllm_fp8_block_scale_routed_moe(
            choices,
            None,
            to_e4m3(groups / factor).flatten(1),
            row_major(factor.squeeze(2).t()),
            row_major(w13.weight),
            first,
            row_major(w2.weight),
            second,
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


class TrtllmMxfp8Blocks(TrtllmExperts):
    """Codes [E, N, K] with rows shuffled, scales of 32 columns in tiles of 128 rows by 4 groups."""

    most_tile = 256
    token_bytes = 30  # with tokens in float32 and as codes, one after the other

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        assert scale is not None
        spread = scale.view(torch.uint8).repeat_interleave(BLOCK, 1).repeat_interleave(_GROUPS, 2)
        tensors: dict[str, Tensor | None] = {
            "weight": each(partial(for_epilogue, side), weight.view(torch.uint8)).view(weight.dtype),
            "scale": in_tiles(for_epilogue(side, spread)),
            "global_scale": None,
            "bias": None,
        }
        return tensors, self._unpack

    @staticmethod
    def _unpack(packed: PackedWeight) -> Tensors:
        codes, tiles = packed.tensors["weight"], packed.tensors["scale"]
        assert codes is not None
        assert tiles is not None
        back = partial(from_epilogue, packed.facts["side"])
        scale = back(out_of_tiles(tiles))[:, ::BLOCK, ::_GROUPS].contiguous().view(E8M0)
        return each(back, codes.view(torch.uint8)).view(packed.dtype), scale, None, None

    def run(
        self, x: Tensor, w13: Matrix, w2: Matrix, choices: tuple[Tensor, Tensor], values: Values, out: Tensor
    ) -> None:
        first, second = scales_of(w13, w2)
        codes, powers = as_mxfp8(x)
        trtllm_fp8_block_scale_routed_moe(
            choices,
            None,
            codes,
            row_major(powers),
            row_major(w13.weight),
            first,
            row_major(w2.weight),
            second,
            *self._sizes(w13),
            RENORMALIZE,
            True,
            _MAJOR_K,
            output=out,
            fp8_quantization_type=_MXFP8,
        )

    def of_zeros(self, side: str, rows: int) -> Matrix:
        codes = torch.zeros(FEW, rows, SMALLEST, dtype=E4M3, device="cuda")
        powers = torch.zeros(FEW, rows, SMALLEST // MX_GROUP, dtype=torch.uint8, device="cuda")
        return Matrix(codes, powers, None, None)


def _packed(side: str, weight: Tensor, scale: Tensor) -> dict[str, Tensor | None]:
    """Up before gate, scales in float32."""
    made, scales = up_first(side, weight), up_first(side, as_float32(scale))
    return {"weight": made, "scale": scales, "global_scale": None, "bias": None}


def _unpack(packed: PackedWeight) -> Tensors:
    weight, scale = packed.tensors["weight"], packed.tensors["scale"]
    assert weight is not None
    assert scale is not None
    weight, scale = (up_first(packed.facts["side"], item) for item in (weight, scale))
    return weight, to_e8m0_up(scale) if packed.facts["scale"][0] is E8M0 else scale, None, None
