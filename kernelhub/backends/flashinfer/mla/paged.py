"""From a call of `mla_attention` to FlashInfer's wrapper of paged latents."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from torch import Tensor

from kernelhub.backends.flashinfer.steps import (
    RECOMMENDED_BYTES,
    TABLES_BYTES,
    Pages,
    StepPlans,
    Wanted,
    attend,
    first_page,
    int32,
    pages_of,
    query_offsets,
    unseeing,
    wanted_for,
)
from kernelhub.backends.shared.operands import aligned
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.attention.problem import ONE
from kernelhub.ops.mla.attention.adapter import MlaAdapter, MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem


class Lengths(NamedTuple):
    """The lengths that the plan of a step needs.

    Attributes:
        q_offsets: int32 [num_seqs + 1] on the host.
        kv_lens: int32 [num_seqs] on the host.
        pages: the latents.
    """

    q_offsets: Tensor
    kv_lens: Tensor
    pages: Pages


class Latent(MlaAdapter):
    """FlashAttention-2, the heads of a token in one tile, keys split where multiprocessors are idle."""

    backend = "fa2"

    def __init__(self, problem: MlaProblem) -> None:
        super().__init__(problem)
        self._causal = problem.causal or (problem.q_len == ONE and not problem.ragged)
        self._dtype = getattr(torch, problem.q_dtype)
        self._plans = StepPlans(self._wrapper, self._fill, self._lengths_of)
        if problem.device.type == "cuda":
            self._plans.load(_one_token, Wanted((), 0, 1.0))

    def begin(self, step: PagedStep) -> None:
        step.lengths()
        if step.cu_seqlens_q is not None:
            step.q_offsets()
        self._plans.begin(step, step.block_table.device)

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
        if step.num_seqs == 0:  # ragged, with tokens that belong to no sequence
            return
        width = self.problem.value_dim
        wanted, factor = wanted_for((q.shape[1],) if q.ndim == 4 else (), values.scale, q.device)
        plan = self._plans.of(step, wanted, q.device)
        cache, run = aligned(kv_cache), plan.lease.run
        latent, rotary = cache[..., :width], cache[..., width:]

        def launch(q: Tensor, **more: Any) -> Any:
            return run(q_nope=q[..., :width], q_pe=q[..., width:], ckv_cache=latent, kpe_cache=rotary, **more)

        attend(launch, plan, q, factor, out, lse)

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        """Scratch, shared by all kernels of a stream, and the tables of one step."""
        return RECOMMENDED_BYTES + TABLES_BYTES

    def _wrapper(self, workspace: Tensor) -> Any:
        return BatchMLAPagedAttentionWrapper(workspace, backend=self.backend)

    def _fill(self, wrapper: Any, lengths: Lengths, wanted: Wanted) -> None:
        problem, pages = self.problem, lengths.pages
        wrapper.plan(
            qo_indptr=lengths.q_offsets,
            kv_indptr=pages.offsets,
            kv_indices=pages.indices,
            kv_len_arr=lengths.kv_lens,
            num_heads=problem.num_heads,
            head_dim_ckv=problem.value_dim,
            head_dim_kpe=problem.rope_dim,
            page_size=problem.page_size,
            causal=self._causal,
            sm_scale=wanted.sm_scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )

    def _lengths_of(
        self, step: PagedStep, shape: tuple[int, ...], device: torch.device
    ) -> tuple[Lengths, int, Tensor | None]:
        q_offsets, kv_lens = query_offsets(step, shape[0] if shape else 1), step.lengths()
        blind = unseeing(q_offsets, kv_lens, self._causal, device)
        lengths = Lengths(int32(q_offsets), int32(kv_lens), pages_of(step, self.problem.page_size))
        return lengths, q_offsets[-1], blind


class LatentHopper(Latent):
    """The same in FlashAttention-3's pipeline."""

    backend = "fa3"


def _one_token(device: torch.device) -> Lengths:
    return Lengths(int32([0, 1]), int32([1]), first_page(device))
