"""The adapter interface of the collectives."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from torch import Tensor

from kernelhub.ops.comm.problem import AllReduceProblem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class AllReduceAdapter(abc.ABC):
    """A kernel of `all_reduce`, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static. Communicate with no rank there.
    2. In `launch` sum `x` over the ranks into `out`, and return nothing.

    The op has checked what its contract says. Tensors may have any strides and no elements; `out` may be `x`.
    """

    def __init__(self, problem: AllReduceProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        """Sum `x` of all ranks into `out` of each; on a CPU raise an error after `timeout_s`."""
