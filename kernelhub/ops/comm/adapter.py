"""The adapter interface of the collectives."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernelhub.ops.comm.problem import AllReduceProblem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class AllReduceAdapter(abc.ABC):
    """A kernel of `all_reduce`, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static. Communicate with no rank there.
    2. In `connect` do what only a first collective does, if a sum of one element does not do it.
    3. In `launch` sum `x` over the ranks into `out`, and return nothing.

    The op has checked what its contract says. Tensors may have any strides and no elements; `out` may be `x`.
    """

    def __init__(self, problem: AllReduceProblem) -> None:
        self.problem = problem

    def connect(self, x: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        """Connect the ranks, which takes seconds and cannot be captured in a graph: here, by a sum of one element.

        Args:
            x: an example of what `launch` gets.
            group: all its ranks call this.
            timeout_s: as of `launch`.
        """
        one = torch.zeros(1, dtype=x.dtype, device=x.device)
        type(self).launch(self, one, one, group, timeout_s)  # not the launch of an instance, which audits replace
        if x.device.type == "cuda":
            torch.cuda.current_stream(x.device).synchronize()

    @abc.abstractmethod
    def launch(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        """Sum `x` of all ranks into `out` of each; on a CPU raise an error after `timeout_s`."""
