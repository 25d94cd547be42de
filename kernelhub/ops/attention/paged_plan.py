"""Plans of ops over a paged cache: what one engine step's layers share is checked once."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.op import Op, ParsedCall
from kernelhub.ops.attention.adapter import PagedStep, plan_step
from kernelhub.ops.attention.arguments import host_values
from kernelhub.ops.attention.paged_call import checked_step
from kernelhub.ops.call_plan import CallPlan


class EngineStep:
    """One engine step: the metadata that its layers share.

    Attributes:
        run: the launch for one layer, with the arguments that its plan says; returns what the op does.
        metadata: the checked block table and lengths.
    """

    __slots__ = ("metadata", "run")

    def __init__(self, run: Callable[..., Any], metadata: PagedStep) -> None:
        self.run = run
        self.metadata = metadata


class PagedPlan(CallPlan):
    """A plan whose `begin` makes a step.

    Attributes:
        cache: the op's parameter that holds the pages, for messages.
    """

    __slots__ = ("_num_pages",)
    repeats = False
    cache: ClassVar[str] = "k_cache"

    def __init__(
        self, op: Op[Any], bound: Bound, parsed: ParsedCall, *, run: Callable[..., Any], values: Mapping[str, Any]
    ) -> None:
        super().__init__(op, bound, parsed, run=run, values=values)
        self._num_pages: int = parsed.arguments[1].shape[0]

    def begin(
        self,
        block_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor | None = None,
        *,
        max_seqlen_q: int | None = None,
        seq_lens_cpu: Sequence[int] | Tensor | None = None,
        cu_seqlens_q_cpu: Sequence[int] | Tensor | None = None,
    ) -> EngineStep:
        """Check one engine step's metadata and let the kernel plan for it, once for all layers.

        Args:
            block_table: int32 [num_seqs, max_pages].
            seq_lens: int32 [num_seqs].
            cu_seqlens_q: int32 [num_seqs + 1] for ragged queries.
            max_seqlen_q: upper bound on the queries of a sequence.
            seq_lens_cpu: the values of seq_lens on the host. With them, and `cu_seqlens_q_cpu` for ragged
                queries, nothing syncs; without them a plan whose `syncs` is true does.
            cu_seqlens_q_cpu: the values of cu_seqlens_q on the host.

        Raises:
            InvalidArgument: the metadata contradicts itself or the plan.
        """
        if GATE.lost:
            GATE.check_device(self.bound.device)
        op, index = self.selection.op, self.bound.device
        problem = self.selection.problem
        step = checked_step(
            problem.page_size,
            problem.ragged,
            torch.device("cpu") if index < 0 else torch.device("cuda", index),
            self._num_pages,
            None,
            block_table,
            seq_lens,
            cu_seqlens_q,
            max_seqlen_q,
            host_values(op, "seq_lens_cpu", seq_lens_cpu),
            host_values(op, "cu_seqlens_q_cpu", cu_seqlens_q_cpu),
            op=op,
            cache=self.cache,
            keep=True,
        )
        return EngineStep(self._runner(plan_step(self.adapter, step)), step)

    @abc.abstractmethod
    def _runner(self, step: PagedStep) -> Callable[..., Any]:
        """The launch for one layer."""
