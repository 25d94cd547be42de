"""Shared by the adapters of TensorRT-LLM's experts, which are distributed as binaries for sm_100 and sm_103.

They are given the routing's result as it is, ids and float32 weights, by the library's entry points for a routing that
was made elsewhere (with MXINT4 weights as one number, the weight in bfloat16). Weights are shuffled when a plan packs
them. A token's choices are summed in their order.
"""

from __future__ import annotations

import abc
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from kernelhub.backends.flashinfer.moe.choices import choices_of
from kernelhub.backends.flashinfer.moe.padding import ONE_E8M0
from kernelhub.backends.shared.operands import is_row_major, on_device_of, row_major
from kernelhub.ops.formats import E4M3
from kernelhub.ops.moe.experts.adapter import W2, W13, ExpertsAdapter, PackingExperts, Values
from kernelhub.ops.moe.experts.problem import FP8_TENSOR, MXFP4, MXINT4, ExpertsProblem
from kernelhub.ops.moe.experts.weights import FP4_GROUP, GROUP, Matrix, matrix
from kernelhub.probes.device import facts_of

RENORMALIZE = 1  # a routing that no kernel runs, as ids are given; but its limits are checked
_LEAST_BYTES = 128 << 10  # of an intermediate
SMALLEST, FEW = 256, 8  # width and experts of the layer that loads the module


class TrtllmExperts(ExpertsAdapter, PackingExperts):
    """One of the library's entry points, which `run` calls.

    Attributes:
        most_tile: rows to whole multiples of which an expert's tokens are filled up, at most.
    """

    most_tile: ClassVar[int]

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
        return inner + hidden + tables + 6 * num_tokens * self._width

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
