"""Adapters of `attention` and `paged_attention` whose launches are repeated: a call comes again with other tensors."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from kernelhub.backends.shared.repeat import Last, Repeated
from kernelhub.ops.attention.adapter import AttentionAdapter, DenseStep, PagedStep
from kernelhub.ops.attention.arguments import Values, optional_tensors
from kernelhub.ops.attention.problem import AttentionProblem, PagedAttentionProblem


class RepeatedAttention(AttentionAdapter[AttentionProblem, Any]):
    """A subclass makes the launches of a call in `_launch_anew`; a call like one before it makes those again."""

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        self._repeated = Repeated(written=-3 if isinstance(problem, PagedAttentionProblem) else -1)
        # Whether a call over pages takes no tensor but q, the caches, `out`, the block table and the lengths.
        self._plain = not (problem.lse or problem.sinks or problem.ragged or problem.kv_scale)

    def launch(
        self, q: Tensor, k: Tensor, v: Tensor, step: Any, values: Values, out: Tensor, lse: Tensor | None
    ) -> None:
        last = step.state
        if type(last) is Last and last.adapter is self:
            if self._plain:
                if (last.values is values or last.values == values) and last.launch(
                    q, k, v, out, step.block_table, step.seq_lens
                ):
                    return
            elif last.values == self._without_tensors(values):
                more = optional_tensors(values, step.cu_seqlens_q)
                if lse is not None:
                    more.append(lse)
                if last.launch(*more, q, k, v, out, step.block_table, step.seq_lens):
                    return
        key, tensors = self._form(q, k, v, step, values, out, lse)
        self._repeated.run(key, tensors, self._launch_anew, q, k, v, step, values, out, lse)
        if type(step) is PagedStep and (last is None or type(last) is Last):
            step.state = self._repeated.last_of(key, self, self._without_tensors(values))

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(*self._form(*given))

    def again(self, step: Any, values: Values) -> Callable[..., bool] | None:
        last = step.state
        if type(last) is not Last or last.adapter is not self or last.values != self._without_tensors(values):
            return None
        return last.again

    @abc.abstractmethod
    def _launch_anew(
        self, q: Tensor, k: Tensor, v: Tensor, step: Any, values: Values, out: Tensor, lse: Tensor | None
    ) -> None:
        """As `AttentionAdapter.launch`."""

    def _without_tensors(self, values: Values) -> tuple[Any, ...]:
        """Values that compare as one: those of a call that has no tensors in them are what they are."""
        if self._plain:
            return values
        scales = [None if isinstance(scale, Tensor) else scale for scale in (values.k_scale, values.v_scale)]
        return (*values[:4], *scales)

    def _form(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: DenseStep | PagedStep,
        values: Values,
        out: Tensor,
        lse: Tensor | None,
    ) -> tuple[Hashable, tuple[Tensor, ...]]:
        """All that the launches of a call depend on, as `Repeated` takes it."""
        k_scale, v_scale = values.k_scale, values.v_scale
        tensors: tuple[Tensor, ...]
        if isinstance(step, PagedStep):
            tensors, keys, bound = (q, k, v, out, step.block_table, step.seq_lens), step.max_pages, None
        else:
            tensors, keys, bound = (q, k, v, out), k.shape[1], step.max_seqlen_k
        if not self._plain:
            of_keys = None if isinstance(step, PagedStep) else step.cu_seqlens_k
            more = [of_keys, *optional_tensors(values, step.cu_seqlens_q), lse]
            tensors = (*[one for one in more if one is not None], *tensors)
        key = (
            step.num_seqs,
            q.shape[0],
            keys,
            bound,
            step.max_seqlen_q,
            values.scale,
            values.softcap,
            values.window_left,
            values.window_right,
            None if isinstance(k_scale, Tensor) else k_scale,
            None if isinstance(v_scale, Tensor) else v_scale,
        )
        return key, tensors
