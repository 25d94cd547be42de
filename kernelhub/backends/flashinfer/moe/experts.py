"""`fused_moe` by the library's CUTLASS kernels.

They have up before gate, so the halves of `w13` change places first: as weights are packed, else once for a plan, else
at each call. A token that chooses an expert twice is given once, with both weights, since the library drops the second
of such choices when tokens are many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from flashinfer.fused_moe.core import cutlass_fused_moe, cutlass_fused_moe_workspace_size
from torch import Tensor

from kernelhub.backends.flashinfer.moe.operands import choices_of, expert_scales, static_scales
from kernelhub.backends.shared.operands import is_row_major, on_device_of, row_major
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.ops.formats import to_e4m3
from kernelhub.ops.moe.experts.adapter import W13, ExpertsAdapter, PackingExperts, Values
from kernelhub.ops.moe.experts.problem import ExpertsProblem
from kernelhub.ops.moe.experts.weights import Matrix
from kernelhub.ops.packed import PackedWeight, Tensors
from kernelhub.ops.precision import without_autocast

_SMALLEST = 128  # width of the layer that loads the module


class Experts(ExpertsAdapter, PackingExperts):
    """Weights in the dtype of the tokens."""

    weight_dtype: torch.dtype | None = None  # that of the tokens
    options: ClassVar[dict[str, bool]] = {}  # of the product and of its workspace
    token_bytes = 4  # of each element of a token, for copies of it and of the result

    def __init__(self, problem: ExpertsProblem) -> None:
        super().__init__(problem)
        self._dtype: torch.dtype = getattr(torch, problem.dtype)
        if problem.device.type == "cuda":  # loads or compiles the module: it reports now what it lacks
            self._load()

    def arrange(self, w13: Matrix, w2: Matrix) -> tuple[Matrix, Matrix]:
        if self.problem.weight_layout != CHECKPOINT:
            return w13, w2
        return w13._replace(weight=swapped(w13.weight)), w2._replace(weight=row_major(w2.weight))

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        return {"weight": up_first(side, weight), "scale": scale, "global_scale": None, "bias": None}, unpack

    def launch(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
    ) -> None:
        ids, weights = choices_of(topk_ids, topk_weights, self.problem.num_experts, values.expert_map)
        width = w2.weight.shape[1]
        direct = is_row_major(out) and out.data_ptr() != x.data_ptr() and out.shape[1] == width
        made = row_major(out) if direct else out.new_empty((out.shape[0], width))
        tokens, with_them = self._given(x, values)
        with on_device_of(x):
            cutlass_fused_moe(
                row_major(tokens),
                ids,
                weights,
                self._weight(w13),
                self._weight(w2),
                self._dtype,
                self._scales(w13, w2, values),
                output=made,
                use_fused_finalize=False,
                **self.options,
                **self._more(w13, w2, values),
                **with_them,
            )
        if not direct:
            out.copy_(made[:, : out.shape[1]])

    def workspace_bytes(self, num_tokens: int) -> int:
        """As the library has it; tokens, choices and a result without gaps."""
        problem = self.problem
        hidden, inner = self._widths
        size = cutlass_fused_moe_workspace_size(
            num_tokens,
            hidden,
            inner,
            problem.num_experts,
            problem.top_k,
            x_dtype=self._x_dtype,
            weight_dtype=self.weight_dtype or self._dtype,
            output_dtype=self._dtype,
            use_fused_finalize=False,
            device=torch.device(problem.device.type),
            **self.options,
        )
        return int(size) + num_tokens * (self.token_bytes * hidden + 16 * problem.top_k * (1 + problem.top_k))

    @property
    def _widths(self) -> tuple[int, int]:
        """Of a token and of an expert, as the library multiplies them."""
        return self.problem.hidden_size, self.problem.intermediate_size

    @property
    def _x_dtype(self) -> torch.dtype:
        return self._dtype

    def _weight(self, side: Matrix) -> Tensor:
        """A weight; the library takes codes of float4 as int64, 16 in one."""
        weight = row_major(side.weight)
        return weight.view(torch.int64) if self.weight_dtype is torch.int64 else weight

    def _given(self, x: Tensor, values: Values) -> tuple[Tensor, dict[str, Any]]:
        """Tokens as they are multiplied, and arguments of the library that go with them."""
        return self._tokens(x, values), {}

    def _tokens(self, x: Tensor, values: Values) -> Tensor:
        """Tokens as they are multiplied, where nothing goes with them."""
        return x

    def _scales(self, w13: Matrix, w2: Matrix, values: Values) -> list[Tensor]:
        """The library's argument `quant_scales`."""
        return []

    def _more(self, w13: Matrix, w2: Matrix, values: Values) -> dict[str, Any]:
        """Further arguments of the library."""
        return {}

    def _load(self) -> None:
        width, dtype = _SMALLEST, self.weight_dtype or self._dtype
        experts = self.problem.num_experts

        def matrix(rows: int) -> Matrix:
            channel = torch.ones(experts, rows, dtype=torch.float32, device="cuda") if self.weight_dtype else None
            return Matrix(torch.zeros(experts, rows, width, dtype=dtype, device="cuda"), None, channel, None)

        one = torch.ones((), dtype=torch.float32, device="cuda")
        ids = torch.zeros(1, self.problem.top_k, dtype=torch.int32, device="cuda")
        x = torch.zeros(1, width, dtype=self._dtype, device="cuda")
        self.launch(x, matrix(2 * width), matrix(width), ids.float(), ids, Values(one, one), torch.empty_like(x))


class ExpertsFp8(Experts):
    """float8 weights with a scale for each expert, by tokens with a scale that is known beforehand."""

    weight_dtype = torch.float8_e4m3fn

    @property
    def _x_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def _tokens(self, x: Tensor, values: Values) -> Tensor:
        assert values.a1_scale is not None
        return to_e4m3(x.float() / values.a1_scale.reshape(1, 1))

    def _scales(self, w13: Matrix, w2: Matrix, values: Values) -> list[Tensor]:
        first, second = expert_scales(w13, w2)
        a1, a2 = static_scales(values)
        return [first * a1, a2.reciprocal(), second * a2, row_major(a1)]


def unpack(packed: PackedWeight) -> Tensors:
    """The inverse of `pack`: weight, scale, global scale and bias."""
    weight = packed.tensors["weight"]
    assert weight is not None
    return up_first(packed.facts["side"], weight), packed.tensors["scale"], None, None


def up_first(side: str, rows: Tensor) -> Tensor:
    """Rows [E, N, ...] of a projection with those of up before those of gate, and back."""
    return swapped(rows) if side == W13 else row_major(rows)


@without_autocast  # which joins no parts of another half precision than its own
def swapped(matrices: Tensor) -> Tensor:
    """[E, 2I, ...] with the halves of each in the other order."""
    half = matrices.shape[1] // 2
    raw: Any = matrices.view(torch.uint8) if matrices.element_size() == 1 else matrices
    return row_major(torch.cat([raw[:, half:], raw[:, :half]], 1).view(matrices.dtype))
