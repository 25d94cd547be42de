"""The adapter interfaces of the collectives."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernelhub.dispatch.bound import Bound
from kernelhub.ops.comm.problem import CollectiveProblem
from kernelhub.ops.known_calls import Repeatable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CollectiveAdapter(Repeatable, abc.ABC):
    """A kernel of a collective, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static. Communicate with no rank there.
    2. In `connect` do what takes long, needs other ranks or cannot be captured in a graph: create communicators and
       workspaces, exchange handles, compile. A workspace must hold ``MESSAGE_BYTES[problem.message]`` of each rank.
       `kernelhub.backends.shared.symmetric` makes workspaces and keeps them while graphs may use them.
    3. In `launch`, of the op's class, run the kernel, and return nothing.

    The op has checked what its contract says. Tensors may have any strides and no elements. One instance may serve
    several groups.
    """

    def __init__(self, problem: CollectiveProblem) -> None:
        self.problem = problem
        self.part_bounds: list[Bound] = []  # of its ops, once `made_of` made them; reports count them

    def made_of(self, device: int) -> tuple[Bound, ...]:
        """The bound selections of the ops that the kernel is made of, for a device as of `Op.bound_for`."""
        return ()

    @abc.abstractmethod
    def connect(self, x: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        """Connect the ranks. `prepare` calls it on all ranks of a group, in the same order, and never in a capture.

        Other ranks get the error that it raises, after the time-out if they wait in a step of their own.

        Args:
            x: an example of what `launch` gets.
            group: the group.
            timeout_s: longest wait for other ranks.
        """


class AllReduceAdapter(CollectiveAdapter):
    """A kernel of `all_reduce`: see `CollectiveAdapter`."""

    @abc.abstractmethod
    def launch(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        """Sum `x` of all ranks into `out` of each, which may be `x`; on a CPU raise an error after `timeout_s`."""


class AllReduceRmsNormAdapter(CollectiveAdapter):
    """A kernel of `all_reduce_rms_norm`: see `CollectiveAdapter`.

    A kernel whose record has format none only gets no `given_scale` and no `scale`.
    """

    @abc.abstractmethod
    def launch(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor,
        residual_out: Tensor,
        group: ProcessGroup,
        timeout_s: float,
        given_scale: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """Write ``sum of x + residual`` to `residual_out`, and its RMSNorm times `weight` to `out`.

        With a format, quantise the RMSNorm of what `residual_out` holds, as `rms_norm_quant` does.

        Args:
            x: ``[..., hidden_size]``, of each rank.
            residual: of the shape and dtype of `x`, equal on all ranks.
            weight: ``[hidden_size]``, of the problem's `weight_dtype`.
            eps: added to the mean of squares.
            out: of the shape and dtype of `x`; it may be `x` or `residual`. With a format, rows of any strides that
                overlap no operand: float8_e4m3fn ``[M, hidden_size]``, or uint8 ``[M, hidden_size / 2]`` for nvfp4.
            residual_out: of the shape and dtype of `x`; it may be `x` or `residual`, and is not `out`.
            group, timeout_s: as of `AllReduceAdapter.launch`.
            given_scale: float32 of one element: the scale of fp8_tensor, the global scale of nvfp4; else None.
            scale: ``[M, groups]`` of any strides, written; None for formats without.
        """


class ReduceScatterAdapter(CollectiveAdapter):
    """A kernel of `reduce_scatter`: see `CollectiveAdapter`."""

    @abc.abstractmethod
    def launch(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        """Write this rank's part of the sum of `x` ``[N, ...]`` to `out` ``[N / W, ...]``."""


class AllGatherAdapter(CollectiveAdapter):
    """A kernel of `all_gather`: see `CollectiveAdapter`. A kernel without the feature `unequal` gets no `rows`."""

    @abc.abstractmethod
    def launch(
        self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float, rows: Sequence[int] | None = None
    ) -> None:
        """Write `x` ``[n, ...]`` of all ranks to `out`, in the order of ranks; `rows` is n of each rank."""


def connect_by_sum(x: Tensor, group: ProcessGroup, timeout_s: float) -> None:
    """Create the communicator of a group's own backend, by a sum of one element."""
    from datetime import timedelta

    work = group.allreduce([torch.zeros(1, dtype=x.dtype, device=x.device)])
    if x.device.type == "cuda":
        work.wait()
        torch.cuda.current_stream(x.device).synchronize()
    else:
        work.wait(timedelta(seconds=timeout_s))
