"""Plans by step and by the values that a plan holds, and running them as our ops promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from kernelhub.backends.flashinfer.operands import split_scale, write_lse
from kernelhub.backends.flashinfer.planning import Lease, Pool, stream_of
from kernelhub.backends.shared.operands import aligned
from kernelhub.runtime.host import refuse_in_graph

_MOST_PLANS = 8  # of a step: layers that differ in their windows, or calls that differ in their sizes


class Wanted(NamedTuple):
    """What a plan holds beyond the step's lengths. FlashInfer wants it when it plans, an op says it when it launches.

    Attributes:
        shape: sizes that no step tells; else empty.
        stream: where the kernel is launched.
        sm_scale: factor of the scores, that of an fp8 key included.
        window_left: keys before its own position that a query sees, -1 for no limit.
        softcap: bound of the scores, 0.0 for none.
    """

    shape: tuple[int, ...]
    stream: int
    sm_scale: float
    window_left: int = -1
    softcap: float = 0.0


class Planned(NamedTuple):
    """A plan of one step, ready to run.

    Attributes:
        lease: the wrapper that holds it.
        num_rows: rows of q that belong to a sequence.
        blind: rows that see no key, or None.
    """

    lease: Lease
    num_rows: int
    blind: Tensor | None


LengthsT = TypeVar("LengthsT")


class StepPlans(Generic[LengthsT]):
    """The plans of one adapter: made when a step's first layer launches, and from then on when a step begins.

    Args:
        make: a wrapper of the library, given scratch.
        fill: plan with a wrapper for lengths.
        lengths_of: step, sizes that it does not tell, device -> lengths for `fill`, rows of q that belong to a
            sequence, rows that see no key.
    """

    def __init__(
        self,
        make: Callable[[Tensor], Any],
        fill: Callable[[Any, LengthsT, Wanted], None],
        lengths_of: Callable[[Any, tuple[int, ...], torch.device], tuple[LengthsT, int, Tensor | None]],
    ) -> None:
        self._pool = Pool(make)
        self._fill = fill
        self._lengths_of = lengths_of
        self._usual: Wanted | None = None

    def load(self, one_token: Callable[[torch.device], LengthsT], wanted: Wanted) -> None:
        """Plan for one token, by which the library loads its module, or compiles it, or says why it cannot."""
        device = torch.device("cuda", torch.cuda.current_device())
        lengths = one_token(device)
        self._pool.plan(device, stream_of(device), lambda wrapper: self._fill(wrapper, lengths, wanted))

    def begin(self, step: Any, device: torch.device) -> None:
        """Plan for a step as it was planned for the last one, if it will be launched on this stream as that was."""
        usual = self._usual
        if usual is not None and step.num_seqs and usual.stream == stream_of(device):
            self.of(step, usual, device)

    def of(self, step: Any, wanted: Wanted, device: torch.device) -> Planned:
        """The plan of a step, made if there is none for these values.

        Raises:
            KernelUnavailable: it is to be made while a CUDA graph is captured, whose replays would have this plan.
        """
        plans: dict[Wanted, Planned] | None = step.state
        if plans is None:
            plans = step.state = {}
        plan = plans.get(wanted)
        if plan is None:
            refuse_in_graph(
                device, "FlashInfer plans on the host for the lengths of a step, which a graph's replays do not do"
            )
            lengths, num_rows, blind = self._lengths_of(step, wanted.shape, device)
            lease = self._pool.plan(device, wanted.stream, lambda wrapper: self._fill(wrapper, lengths, wanted))
            if len(plans) >= _MOST_PLANS:
                plans.clear()
            plan = plans[wanted] = Planned(lease, num_rows, blind)
            self._usual = wanted
        return plan


def wanted_for(
    shape: tuple[int, ...], scale: float, device: torch.device, window_left: int = -1, softcap: float = 0.0
) -> tuple[Wanted, float]:
    """What a plan for these values holds, and the factor of q beside it."""
    sm_scale, factor = split_scale(scale)
    return Wanted(shape, stream_of(device), sm_scale, window_left, softcap), factor


def attend(
    run: Callable[..., Any],
    plan: Planned,
    q: Tensor,
    factor: float,
    out: Tensor,
    lse: Tensor | None,
    v_scale: float | None = None,
) -> None:
    """Run a plan into `out` and `lse`, minding what the library does not: blind rows, bases, factors, strides.

    Args:
        run: takes q of [T, H, D], aligned, and `out` and `return_lse` by name.
        plan: the plan.
        q: [T, H, D] or [num_seqs, tokens, H, D].
        factor: what q is multiplied by first.
        out: as q, of its own width.
        lse: [H, T] or [num_seqs, H, tokens], or None.
        v_scale: what the result is multiplied by.
    """
    rows = plan.num_rows
    if rows == 0:
        return
    into = out
    if q.ndim == 4:
        q = q.flatten(0, 1)
    elif rows != q.shape[0]:
        q, into = q[:rows], out[:rows]
    if factor != 1.0:
        q = q * factor
    direct = into.is_contiguous() and not into.data_ptr() & 15
    made = into if direct else into.new_empty(into.shape)
    flat = made.view(-1, *made.shape[-2:])
    if lse is None:
        run(aligned(q), out=flat)
    else:
        _, base2 = run(aligned(q), out=flat, return_lse=True)
        if plan.blind is not None:
            base2.index_fill_(0, plan.blind, -torch.inf)
        write_lse(base2, lse)
    if v_scale is not None:
        flat.mul_(v_scale)
    if plan.blind is not None:
        flat.index_fill_(0, plan.blind, 0.0)
    if not direct:
        into.copy_(made)
