"""The adapter interface of `fp8_gemm`."""

from __future__ import annotations

import abc
from collections.abc import Hashable
from typing import Any

from torch import Tensor

from kernelhub.ops.gemm.fp8.problem import Fp8GemmProblem


class Fp8GemmAdapter(abc.ABC):
    """A kernel of the op, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static: the scaling, N and K are.
    2. In `launch` write into `out` and return nothing. Whatever depends on the number of rows is decided here.
    3. State in `workspace_bytes` what memory a launch takes beyond that.

    The op has checked what its contract says. Tensors may have any strides.
    """

    def __init__(self, problem: Fp8GemmProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """a [M, K], b [N, K] float8_e4m3fn; bias [N] in the dtype of out; out [M, N]; M > 0.

        If the record has the feature `e5m2` and the problem requests it, a is float8_e5m2.

        Scales are as the user gave them, in any of the forms that the problem's scaling means; e8m0 may be uint8.
        """

    @staticmethod
    def identified(*given: Tensor | None) -> tuple[Hashable, tuple[Tensor, ...]]:
        """The key and the tensors of a call whose launches may be repeated: what is given, `out` last."""
        tensors = tuple(one for one in given if one is not None)
        return tensors[-1].shape[0], tensors

    def repeated(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> Any:
        """Of a launch with these arguments what `KnownCalls.attach` takes, or None."""
        return None

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """Memory beyond operands and result that a launch on this many rows takes, at most."""
        return 0


class WeightOnlyAdapter(abc.ABC):
    """A further base class of adapters whose record has the feature `weight_only`."""

    @abc.abstractmethod
    def launch_weights(self, a: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """As `launch`, with a of the dtype `weight_only` and without scales.

        A kernel with a layout of its own is a `kernelhub.ops.packed.PackingAdapter` too: its `pack` takes codes and
        scale as in a checkpoint, and gives ``codes`` and ``scale``, which come here as b and b_scale.
        """
