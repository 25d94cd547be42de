"""The adapter interface of `expert_parallel_moe`."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from kernelhub.dispatch.selection import Selection
from kernelhub.ops.moe.parallel.problem import ParallelProblem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Layer(NamedTuple):
    """One call.

    Attributes:
        x: ``[T, H]``.
        topk_weights: float32 ``[T, top_k]``.
        topk_ids: int32 ``[T, top_k]``, global.
        w13, w2: of this rank's experts.
        scales: the other tensors of the weights, by their names in `fused_moe`; those that are missing are left out.
        numbers: ``alpha`` and ``limit``.
        max_tokens: most tokens of a rank, or None.
    """

    x: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    w13: Tensor
    w2: Tensor
    scales: Mapping[str, Tensor]
    numbers: Mapping[str, float]
    max_tokens: int | None


class Part(NamedTuple):
    """One step of a pair.

    Attributes:
        step: the op, or the name of a converter.
        selection: what was selected for it; None of a converter.
        note: the format, or what a converter does.
    """

    step: str
    selection: Selection[Any] | None
    note: str

    def __str__(self) -> str:
        selected = "" if self.selection is None else str(self.selection.selected)
        return f"{self.step:<14} {selected:<24} {self.note}".rstrip()


class ParallelAdapter(abc.ABC):
    """A pair of a format and an op that runs experts in it, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static. Communicate with no rank there.
    2. In `connect` prepare plans of the dispatch and of the combine, and return the steps; all ranks call it.
    3. In `launch` run the layer, and return nothing. A rank without tokens launches, too.
    """

    def __init__(self, problem: ParallelProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def connect(self, layer: Layer, group: ProcessGroup) -> tuple[Part, ...]:
        """Prepare what `launch` needs in a group, for calls like this; the steps, with what was selected for each."""

    @abc.abstractmethod
    def launch(self, layer: Layer, out: Tensor, group: ProcessGroup) -> None:
        """The layer's result for this rank's tokens into out ``[T, H]``."""
