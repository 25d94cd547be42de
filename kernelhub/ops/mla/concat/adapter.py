"""The adapter interface of `concat_mla_k`."""

from __future__ import annotations

import abc

from torch import Tensor

from kernelhub.ops.known_calls import Repeatable
from kernelhub.ops.mla.concat.problem import ConcatProblem


class ConcatAdapter(Repeatable, abc.ABC):
    """A kernel of the op, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static.
    2. In `launch` write into `out` and return nothing.

    The op has checked what its contract says. Tensors may have any strides.
    """

    def __init__(self, problem: ConcatProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(self, k_nope: Tensor | None, k_rope: Tensor, out: Tensor) -> None:
        """k_nope [T, H, N], or None if out already contains it; k_rope [T, R]; out [T, H, N + R]; T > 0."""
