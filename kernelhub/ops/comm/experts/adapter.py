"""The adapter interfaces of `moe_dispatch` and `moe_combine`."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from kernelhub.ops.comm.experts.problem import CombineProblem, DispatchProblem
from kernelhub.ops.comm.experts.received import Dispatched, Handle, Header
from kernelhub.ops.comm.experts.results import Results
from kernelhub.ops.known_calls import Repeatable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Outgoing(NamedTuple):
    """This rank's tokens.

    Attributes:
        x: ``[T, H]``, any strides.
        scales: float32 ``[T, ceil(H / 128)]``, or None.
        topk_ids: int32 ``[T, top_k]``, contiguous. Those below 0 or from `num_experts` on name no expert.
        topk_weights: float32 ``[T, top_k]``, contiguous.
        max_tokens: most tokens of a rank; 0 if exact.
        out: a result of such calls that this one is to become, or None.
    """

    x: Tensor
    scales: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor
    max_tokens: int
    out: Dispatched | None = None


class DispatchAdapter(Repeatable, abc.ABC):
    """A kernel of `moe_dispatch`, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static. Communicate with no rank there.
    2. In `connect` do what only a first collective does: connections, workspaces, the exchange of their addresses.
    3. In `launch` exchange tokens, and return what this rank received, in the problem's format. With a capacity an
       adapter may write it to the tensors of `outgoing.out`, renew that, and return it; else the op copies.

    The op has checked what its contract says. A rank without tokens launches, too. With a capacity (`max_tokens`) no
    shape may depend on values, and nothing may wait for the device.
    """

    def __init__(self, problem: DispatchProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def connect(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> None:
        """Connect the ranks for calls like this, which takes seconds and cannot be captured; all ranks call this."""

    @abc.abstractmethod
    def launch(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> Dispatched:
        """Exchange tokens; on a CPU raise an error after `timeout_s`."""

    def results(self, outgoing: Outgoing) -> Results:
        """What makes the results of calls like this, for an adapter that has `repeated`.

        Its arguments are then those of `launch`, behind `outgoing` the tensors of its result, as of `outputs_of`.
        """
        raise NotImplementedError(f"{type(self).__name__} repeats launches: it must make their results, too")


class CombineAdapter(Repeatable, abc.ABC):
    """A kernel of `moe_combine`, made for one problem; written in the same steps."""

    def __init__(self, problem: CombineProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def connect(self, y: Tensor, handle: Handle, header: Header, group: ProcessGroup, timeout_s: float) -> None:
        """Connect the ranks for calls like this; all ranks call this."""

    @abc.abstractmethod
    def launch(
        self, y: Tensor, handle: Handle, header: Header, out: Tensor, group: ProcessGroup, timeout_s: float
    ) -> None:
        """The sum of the results of each own token into `out` [T, H].

        For ``tokens`` y is weighted and summed over this rank's experts. For the other formats this weighs and sums in
        float32. y: any strides; rows that the handle does not name hold anything.
        """
