"""The adapter interface of `merge_attention_states`."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from torch import Tensor

from kernelhub.ops.known_calls import Repeatable
from kernelhub.ops.merge.problem import MergeProblem


class MergeAdapter(Repeatable, abc.ABC):
    """A kernel of the op, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static.
    2. In `launch` run the kernel into `out` and, if it is given, `lse`, and return nothing.

    The op has checked what its contract says. Tensors may have any strides; `out` may be one of `outs`, and `lse`
    one of `lses`: read what a place holds before writing it. Where `out_scale` is given, `out` is float8_e4m3fn.
    """

    def __init__(self, problem: MergeProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(
        self,
        outs: Sequence[Tensor] | Tensor,
        lses: Sequence[Tensor] | Tensor,
        out: Tensor,
        lse: Tensor | None,
        out_scale: float | Tensor | None = None,
    ) -> None:
        """Merge two states or more, of [T, H, D] and [H, T] or of [B, S, H, D] and [B, H, S]; none is empty.

        They come in a list, or stacked along a first dimension. `out_scale` is a float, or float32 of one element on
        the device, where the record has the feature of that name.
        """
