"""The adapter interface of `fused_moe`."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from kernelhub.ops.moe.experts.problem import ExpertsProblem
from kernelhub.ops.moe.experts.weights import Matrix
from kernelhub.ops.packed import PackedWeight, Tensors

W13, W2 = "w13", "w2"


class Values(NamedTuple):
    """The rest of a call.

    Attributes:
        a1_scale: float32 of one element, the scale of the quantised tokens; None if it is found for each row.
        a2_scale: the same of what the activation gives.
        alpha: of ``swiglu_oai`` and ``swiglu_clamped``.
        limit: of these and of ``swiglu_step``.
        expert_map: int32 [E_global], local ids by global ones, or None.
        residual: [T, H] in the dtype of the tokens, or None.
    """

    a1_scale: Tensor | None = None
    a2_scale: Tensor | None = None
    alpha: float = 1.702
    limit: float = 7.0
    expert_map: Tensor | None = None
    residual: Tensor | None = None


class ExpertsAdapter(abc.ABC):
    """A kernel of the op, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static.
    2. In `launch` write the result into `out`, and return nothing.
    3. If the kernel needs another layout of weights, convert them in `arrange`; or, if the record has a layout
       of its own (`packs_to`), be a `PackingExperts` too, whose `pack` does that once, when a model is loaded.
    4. Say in `workspace_bytes` what memory it takes beyond operands and result, and in `tiles` which sizes it takes.

    The op has checked what its contract says, but for the values of ids: those outside of the experts must add nothing
    and read nothing. Tensors may have any strides, but weights and their scales are contiguous along K.
    """

    def __init__(self, problem: ExpertsProblem) -> None:
        self.problem = problem

    def arrange(self, w13: Matrix, w2: Matrix) -> tuple[Matrix, Matrix]:
        """The weights in the layout for `launch`. A plan calls this once and keeps them, a direct call each time."""
        return w13, w2

    @abc.abstractmethod
    def launch(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
    ) -> None:
        """x and out [T, H], topk_weights float32 and topk_ids int32 [T, top_k]; T > 0."""

    def repeated(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
    ) -> Any:
        """Of a launch with these arguments what `KnownCalls.attach` takes, or None."""
        return None

    def workspace_bytes(self, num_tokens: int) -> int:
        """Device memory beyond the operands that calls of up to so many tokens take, at most."""
        return 0

    def tiles(self, num_tokens: int) -> str:
        """The tile sizes of a call of so many tokens and their source, in words; "" if the kernel has one size."""
        return ""


class PackingExperts(abc.ABC):
    """A further base class of adapters whose record has `packs_to`."""

    @abc.abstractmethod
    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        """One projection, `W13` or `W2`, in the layout `packs_to`.

        It is given as in a checkpoint, and moves bytes only. The result is ``weight``, ``scale``, ``global_scale`` and
        ``bias``, which `launch` is given as a `Matrix` again, and a module's function that gives back the arguments.
        """
