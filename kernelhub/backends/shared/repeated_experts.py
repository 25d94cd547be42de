"""Adapters of `fused_moe` whose launches are repeated where a call comes again with other tensors."""

from __future__ import annotations

import abc
from collections.abc import Hashable
from typing import Any

from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.ops.moe.experts.adapter import ExpertsAdapter, Values
from kernelhub.ops.moe.experts.problem import ExpertsProblem
from kernelhub.ops.moe.experts.weights import Matrix


class RepeatedExperts(ExpertsAdapter):
    """A subclass makes the launches of a round of tokens; a call like one before it makes those of all rounds again."""

    def __init__(self, problem: ExpertsProblem) -> None:
        super().__init__(problem)
        self._repeated = Repeated()

    def launch(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
    ) -> None:
        call = _identified(x, w13, w2, topk_weights, topk_ids, values, out)
        self._repeated.run(*call, self._launch_rounds, x, w13, w2, topk_weights, topk_ids, values, out)

    def repeated(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
    ) -> Any:
        return self._repeated.sequence_of(*_identified(x, w13, w2, topk_weights, topk_ids, values, out))

    def _launch_rounds(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
    ) -> None:
        step = self._round(x.shape[0])
        with on_device_of(x):
            if step == x.shape[0]:
                self._launch(x, w13, w2, topk_weights, topk_ids, values, out)
                return
            for start in range(0, x.shape[0], step):
                rows = slice(start, start + step)
                residual = None if values.residual is None else values.residual[rows]
                routed = (topk_weights[rows], topk_ids[rows])
                self._launch(x[rows], w13, w2, *routed, values._replace(residual=residual), out[rows])

    @abc.abstractmethod
    def _round(self, num_tokens: int) -> int:
        """Tokens at a time, of so many."""

    @abc.abstractmethod
    def _launch(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
    ) -> None:
        """One round, on the device of the tensors."""


def _identified(
    x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
) -> tuple[Hashable, list[Tensor]]:
    """The key of a call's launches, and the tensors that they read or write."""
    a1_scale, a2_scale, alpha, limit, expert_map, residual = values
    given = (x, topk_weights, topk_ids, out, *w13, *w2, a1_scale, a2_scale, expert_map, residual)
    return (x.shape[0], alpha, limit), [one for one in given if one is not None]
