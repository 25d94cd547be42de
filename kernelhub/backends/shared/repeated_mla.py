"""Adapters of `mla_attention` whose launches are repeated where a call comes again with other tensors."""

from __future__ import annotations

import abc
from collections.abc import Callable

from torch import Tensor

from kernelhub.backends.shared.repeat import Last, Repeated
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.mla.attention.adapter import MlaAdapter, MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem


class RepeatedMla(MlaAdapter):
    """A subclass makes the launches of a call in `launch_anew`; a call like one before it makes those again."""

    def __init__(self, problem: MlaProblem) -> None:
        super().__init__(problem)
        self._repeated = Repeated(written=2)

    def launch(
        self,
        q: Tensor,
        kv_cache: Tensor,
        topk_indices: Tensor | None,
        step: PagedStep,
        values: MlaValues,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        last = step.state
        if (
            type(last) is Last
            and last.adapter is self
            and (last.values is values or last.values == values)  # which hold no tensors
            and last.launch(q, kv_cache, out, step.block_table, step.seq_lens)
        ):
            return
        kv_scale = values.kv_scale
        optional = (topk_indices, lse, values.sinks, kv_scale, step.cu_seqlens_q)
        more = [one for one in optional if isinstance(one, Tensor)]
        tensors = (q, kv_cache, out, step.block_table, step.seq_lens, *more)
        on_host = None if isinstance(kv_scale, Tensor) else kv_scale
        key = (step.num_seqs, q.shape[0], step.max_pages, values.scale, on_host)
        self._repeated.run(key, tensors, self.launch_anew, q, kv_cache, topk_indices, step, values, out, lse)
        if not more and (last is None or type(last) is Last):
            step.state = self._repeated.last_of(key, self, values)

    def again(self, step: PagedStep, values: MlaValues) -> Callable[..., bool] | None:
        last = step.state
        return last.again if type(last) is Last and last.adapter is self and last.values == values else None

    @abc.abstractmethod
    def launch_anew(
        self,
        q: Tensor,
        kv_cache: Tensor,
        topk_indices: Tensor | None,
        step: PagedStep,
        values: MlaValues,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """As `MlaAdapter.launch`."""
