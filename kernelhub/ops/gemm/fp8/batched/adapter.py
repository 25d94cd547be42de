"""The adapter interface of `bmm_fp8`."""

from __future__ import annotations

import abc

from torch import Tensor

from kernelhub.ops.gemm.fp8.batched.problem import BmmFp8Problem
from kernelhub.ops.known_calls import Repeatable


class BmmFp8Adapter(Repeatable, abc.ABC):
    """A kernel of the op, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static: N and K are.
    2. In `launch` write into `out` and return nothing. Whatever depends on batch and rows is decided here.

    The op has checked what its contract says. Tensors may have any strides.
    """

    def __init__(self, problem: BmmFp8Problem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
        """a [B, M, K], b [B, N, K] float8_e4m3fn, that of `e5m2` float8_e5m2; out [B, M, N]; none is empty.

        Scales are float32 [] or [1], or per matrix [B] or [B, 1, 1].
        """

    def workspace_bytes(self, *, batch: int, num_tokens: int) -> int:
        """Memory beyond operands and result that a launch of this size takes, at most."""
        return 0
