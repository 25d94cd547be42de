"""The adapter interface of `linear_attention`."""

from __future__ import annotations

import abc
from typing import NamedTuple

from torch import Tensor

from kernelhub.ops.known_calls import Repeatable
from kernelhub.ops.linear_attention.problem import LinearProblem


class States(NamedTuple):
    """The initial states of sequences, and the destinations of their final states.

    Attributes:
        before: float32 [slots, H, D, Dv], or None where all start from zero.
        before_at: int32 [N], the slot of each sequence in `before`; None for its own number. A sequence at a negative
            one starts from zero.
        after: destination, which may be `before` itself, or None where nothing is kept.
        after_at: as `before_at`; of a sequence at a negative one nothing is kept.
    """

    before: Tensor | None
    before_at: Tensor | None
    after: Tensor | None
    after_at: Tensor | None


class LinearAdapter(Repeatable, abc.ABC):
    """A kernel of the op, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static.
    2. In `launch` write `out` and, if it is given, `states.after`, and return nothing.

    The op has checked what its contract says. Tensors may have any strides. A slot's state is read before it is
    written by what computes it, since both may be one. A sequence without tokens passes its state on.
    """

    def __init__(self, problem: LinearProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        scale: float,
        cu_seqlens: Tensor | None,
        states: States,
        out: Tensor,
    ) -> None:
        """q, k [B, S, H, D], or [T, H, D] with cu_seqlens [N + 1]; v and out so with Dv; decay [H]; N > 0."""
