"""From a call of `paged_attention` with sinks to FlashInfer's only planned wrapper that applies them."""

from __future__ import annotations

from typing import Any

import torch
from flashinfer.attention import BatchAttentionWithAttentionSinkWrapper
from torch import Tensor

from kernelhub.backends.flashinfer.attention.paged import Prefill
from kernelhub.backends.flashinfer.steps import alike, attend, wanted_for
from kernelhub.backends.shared.operands import row_major
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.attention.arguments import Values


class Sinks(Prefill):
    """FlashAttention-2 with a learned score for each head in the denominator."""

    def launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: PagedStep,
        values: Values,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        if step.num_seqs == 0:  # ragged, with tokens that belong to no sequence
            return
        shape = (q.shape[1],) if q.ndim == 4 else ()
        wanted, factor = wanted_for(shape, values.scale, q.device, values.window_left)
        plan = self._plans.of(step, wanted, q.device)
        cache, run = alike(k, v), plan.lease.run
        assert values.sinks is not None
        sinks = row_major(values.sinks.to(torch.float32))
        attend(lambda q, **more: run(q, cache, sinks, wanted.sm_scale, **more), plan, q, factor, out, None)

    def _wrapper(self, workspace: Tensor) -> Any:
        problem = self.problem
        return BatchAttentionWithAttentionSinkWrapper(
            workspace,
            kv_layout=problem.kv_layout,
            backend=self.backend,
            q_data_type=self._types["q_data_type"],
            kv_data_type=self._types["kv_data_type"],
            head_dim_qk=problem.head_dim_qk,
            head_dim_vo=problem.head_dim_vo,
            window_left=0 if problem.window_left else -1,  # whether there is one; how wide it is, the plan says
        )


class SinksHopper(Sinks):
    """The same in FlashAttention-3's pipeline."""

    backend = "fa3"
