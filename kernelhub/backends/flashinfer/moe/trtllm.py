"""TensorRT-LLM's experts, distributed as binaries for sm_100 and sm_103: what they share, and weights by wide tokens.

They are given the routing's result as it is, ids and float32 weights, by the library's entry points for a routing that
was made elsewhere. Weights are shuffled when a plan packs them. A token's choices are summed in their order.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from flashinfer.fused_moe.core import (
    trtllm_bf16_routed_moe,
    trtllm_fp8_per_tensor_scale_routed_moe,
    trtllm_mxint4_block_scale_routed_moe,
)
from torch import Tensor

from kernelhub.backends.flashinfer.moe.layouts import (
    each,
    for_epilogue,
    from_epilogue,
    in_blocks,
    in_tiles,
    out_of_blocks,
    out_of_tiles,
)
from kernelhub.backends.flashinfer.moe.operands import choices_of, expert_scales, scales_of, static_scales
from kernelhub.backends.flashinfer.moe.padding import ONE_E8M0
from kernelhub.backends.shared.operands import is_row_major, on_device_of, row_major
from kernelhub.ops.formats import E4M3, to_e4m3
from kernelhub.ops.moe.experts.adapter import W2, W13, ExpertsAdapter, PackingExperts, Values
from kernelhub.ops.moe.experts.problem import FP8_TENSOR, MXFP4, MXINT4, ExpertsProblem
from kernelhub.ops.moe.experts.weights import FP4_GROUP, GROUP, Matrix, matrix
from kernelhub.ops.packed import PackedWeight, Tensors
from kernelhub.probes.device import facts_of

RENORMALIZE = 1  # a routing that no kernel runs, as ids are given; but its limits are checked
_BLOCK_MAJOR_K = 2  # flashinfer.tllm_enums.WeightLayout
_LEAST_BYTES = 128 << 10  # of an intermediate
SMALLEST, FEW = 256, 8  # width and experts of the layer that loads the module


class TrtllmExperts(ExpertsAdapter, PackingExperts):
    """One of the library's entry points, which `run` calls.

    Attributes:
        most_tile: rows to whole multiples of which an expert's tokens are filled up, at most.
        token_bytes: of each element of a token, for copies of it and of the result.
    """

    most_tile: ClassVar[int]
    token_bytes: ClassVar[int] = 6

    def __init__(self, problem: ExpertsProblem) -> None:
        super().__init__(problem)
        if problem.device.type == "cuda":  # loads or compiles the module: it reports now what it lacks
            self._load()

    @abc.abstractmethod
    def run(
        self, x: Tensor, w13: Matrix, w2: Matrix, choices: tuple[Tensor, Tensor], values: Values, out: Tensor
    ) -> None:
        """Into out, bfloat16, row after row; x is, too, and is not out."""

    def launch(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
    ) -> None:
        direct = is_row_major(out) and out.data_ptr() != x.data_ptr()
        made = row_major(out) if direct else out.new_empty(out.shape)
        choices = choices_of(topk_ids, topk_weights, self.problem.num_experts, values.expert_map)
        with on_device_of(x):
            self.run(row_major(x), w13, w2, choices, values, made)
        if not direct:
            out.copy_(made)

    @property
    def _width(self) -> int:
        """Of a token as it is multiplied."""
        return self.problem.hidden_size

    @property
    def _inner_width(self) -> int:
        return self.problem.intermediate_size

    def _sizes(self, w13: Matrix) -> tuple[int, int, None, None, int, int, int, None]:
        """Experts, choices, groups, width of an expert, and that all experts are here."""
        experts = w13.weight.shape[0]
        return experts, self.problem.top_k, None, None, self._inner_width, 0, experts, None

    def workspace_bytes(self, num_tokens: int) -> int:
        """Both intermediates, each expert's tokens filled up to whole tiles; the routing's tables; copies."""
        problem = self.problem
        choices = num_tokens * problem.top_k
        rows = choices + min(choices, problem.num_experts) * (self.most_tile - 1)
        inner, hidden = (max(_LEAST_BYTES, 2 * rows * width) for width in (2 * self._inner_width, self._width))
        tables = 4 * (4 * rows + 4 * problem.num_experts + 512) + choices * (12 + 2 * problem.top_k)
        return inner + hidden + tables + self.token_bytes * num_tokens * self._width

    def _load(self) -> None:
        """Pack and run a layer of few and small experts."""
        wide = SMALLEST
        few = replace(self.problem, num_experts=FEW, top_k=1, hidden_size=wide, intermediate_size=wide)
        small = type(self)(replace(few, device=facts_of(-1)))  # which loads nothing
        x = torch.zeros(1, SMALLEST, dtype=torch.bfloat16, device="cuda")
        ids = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
        w13, w2 = small.of_zeros(W13, 2 * wide), small.of_zeros(W2, wide)
        one = torch.ones(1, dtype=torch.float32, device="cuda")
        small.launch(x, w13, w2, ids.float(), ids, Values(one, one), torch.empty_like(x))

    def of_zeros(self, side: str, rows: int) -> Matrix:
        """A projection of zeros as it is packed, for loading."""
        tensors, _ = self.pack(side, *_zeros(self.problem.weights, rows), None, None)
        weight = tensors["weight"]
        assert weight is not None
        return matrix(self.problem.weights, weight, tensors["scale"], None, None)


class TrtllmBf16(TrtllmExperts):
    """bfloat16 weights [E, K / 64, N, 64], rows shuffled."""

    most_tile = 128

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        def moved(expert: Tensor) -> Tensor:
            return in_blocks(for_epilogue(side, expert.contiguous().view(torch.uint8)))

        made = each(moved, weight).view(torch.bfloat16)
        return {"weight": made, "scale": None, "global_scale": None, "bias": None}, self._unpack

    @staticmethod
    def _unpack(packed: PackedWeight) -> Tensors:
        blocks = packed.tensors["weight"]
        assert blocks is not None

        def back(expert: Tensor) -> Tensor:
            return from_epilogue(packed.facts["side"], out_of_blocks(expert))

        return each(back, blocks.view(torch.uint8)).view(packed.dtype), None, None, None

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


class TrtllmFp8(TrtllmExperts):
    """float8 weights [E, N, K] with a scale for each expert, rows shuffled, by tokens with a known scale.

    The result of the activation is quantised from the float32 sums, with the scale that `fused_moe` is given for it.
    """

    most_tile = 128

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        made = each(partial(for_epilogue, side), weight.view(torch.uint8)).view(weight.dtype)
        return {"weight": made, "scale": scale, "global_scale": None, "bias": None}, self._unpack

    @staticmethod
    def _unpack(packed: PackedWeight) -> Tensors:
        made = packed.tensors["weight"]
        assert made is not None
        weight = each(partial(from_epilogue, packed.facts["side"]), made.view(torch.uint8))
        return weight.view(packed.dtype), packed.tensors["scale"], None, None

    def run(
        self, x: Tensor, w13: Matrix, w2: Matrix, choices: tuple[Tensor, Tensor], values: Values, out: Tensor
    ) -> None:
        first, second = expert_scales(w13, w2)
        a1, a2 = static_scales(values, 1)
        both = first * a1
        trtllm_fp8_per_tensor_scale_routed_moe(
            choices,
            None,
            row_major(to_e4m3(x.float() / a1)),
            row_major(w13.weight),
            both / a2,
            both,
            row_major(w2.weight),
            second * a2,
            *self._sizes(w13),
            False,
            RENORMALIZE,
            output=out,
        )


class TrtllmMxint4(TrtllmExperts):
    """Codes [E, K / 256, N, 128] and bfloat16 scales in tiles of 128 rows by 4 groups, rows shuffled.

    The library takes a routing for such weights in one form alone: an id and a bfloat16 weight in one number, which is
    within what a result may be off (`kernelhub.ops.moe.experts.tolerance`), as what an expert adds may be rounded, too.
    """

    most_tile = 128

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        assert scale is not None
        tensors: dict[str, Tensor | None] = {
            "weight": each(lambda codes: in_blocks(for_epilogue(side, codes)), weight),
            "scale": in_tiles(for_epilogue(side, scale)),
            "global_scale": None,
            "bias": None,
        }
        return tensors, self._unpack

    @staticmethod
    def _unpack(packed: PackedWeight) -> Tensors:
        blocks, tiles = packed.tensors["weight"], packed.tensors["scale"]
        assert blocks is not None
        assert tiles is not None
        back = partial(from_epilogue, packed.facts["side"])
        return each(lambda codes: back(out_of_blocks(codes)), blocks), back(out_of_tiles(tiles)), None, None

    def run(
        self, x: Tensor, w13: Matrix, w2: Matrix, choices: tuple[Tensor, Tensor], values: Values, out: Tensor
    ) -> None:
        first, second = scales_of(w13, w2)
        trtllm_mxint4_block_scale_routed_moe(
            _in_one_number(*choices),
            x,
            row_major(w13.weight),
            first,
            None,
            None,
            None,
            row_major(w2.weight),
            second,
            *self._sizes(w13),
            RENORMALIZE,
            output=out,
        )


def _in_one_number(ids: Tensor, weights: Tensor) -> Tensor:
    """int32 [T, top_k]: the id above, below it the bits of the weight in bfloat16."""
    bits = weights.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF
    return ids << 16 | bits


def _zeros(weights: str, rows: int) -> tuple[Tensor, Tensor | None]:
    """Experts of zeros in a format, on the current GPU."""
    shape = (FEW, rows, SMALLEST)
    if weights == MXFP4:
        groups = SMALLEST // FP4_GROUP[MXFP4]
        codes = torch.zeros(FEW, rows, SMALLEST // 2, dtype=torch.uint8, device="cuda")
        return codes, codes.new_full((FEW, rows, groups), ONE_E8M0)
    if weights == MXINT4:
        codes = torch.zeros(FEW, rows, SMALLEST // 2, dtype=torch.uint8, device="cuda")
        return codes, torch.ones(FEW, rows, SMALLEST // GROUP[MXINT4], dtype=torch.bfloat16, device="cuda")
    if weights == FP8_TENSOR:
        return torch.zeros(shape, dtype=E4M3, device="cuda"), torch.ones(FEW, device="cuda", dtype=torch.float32)
    return torch.zeros(shape, dtype=torch.bfloat16, device="cuda"), None
