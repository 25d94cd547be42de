"""From a call of `paged_attention` to FlashInfer's wrappers of paged caches."""

from __future__ import annotations

import abc
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from kernelhub.backends.flashinfer.steps import (
    RECOMMENDED_BYTES,
    TABLES_BYTES,
    Pages,
    StepPlans,
    Wanted,
    alike,
    attend,
    first_page,
    int32,
    pages_of,
    query_offsets,
    unseeing,
    wanted_for,
)
from kernelhub.ops.attention.adapter import AttentionAdapter, PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import ONE, PagedAttentionProblem


class Lengths(NamedTuple):
    """The lengths that the plan of a paged step needs.

    Attributes:
        q_offsets: int32 [num_seqs + 1] on the host.
        longest: most queries of a sequence.
        pages: the keys.
    """

    q_offsets: Tensor
    longest: int
    pages: Pages


class PagedWrapper(AttentionAdapter[PagedAttentionProblem, PagedStep]):
    """A wrapper of a paged cache, which reads the lengths of a step on the host."""

    def __init__(self, problem: PagedAttentionProblem) -> None:
        super().__init__(problem)
        # A sole query sees all of its sequence, and causal masks are what windows were written for.
        self._causal = problem.causal or (problem.q_len == ONE and not problem.ragged)
        dtype = getattr(torch, problem.q_dtype)
        self._types = {"q_data_type": dtype, "kv_data_type": getattr(torch, problem.kv_dtype), "o_data_type": dtype}
        self._plans = StepPlans(self._wrapper, self._fill, self._lengths_of)
        if problem.device.type == "cuda":
            window_left, softcap = 0 if problem.window_left else -1, 1.0 if problem.softcap else 0.0
            self._plans.load(_one_token, Wanted((), 0, 1.0, window_left, softcap))

    def begin(self, step: PagedStep) -> None:
        step.lengths()
        if step.cu_seqlens_q is not None:
            step.q_offsets()
        self._plans.begin(step, step.block_table.device)

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
        scale = values.scale if values.k_scale is None else values.scale * float(values.k_scale)
        wanted, factor = wanted_for(shape, scale, q.device, values.window_left, values.softcap)
        plan = self._plans.of(step, wanted, q.device)
        cache, run = alike(k, v), plan.lease.run
        v_scale = None if values.v_scale is None else float(values.v_scale)
        attend(lambda q, **more: run(q, cache, **more), plan, q, factor, out, lse, v_scale)

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        """Scratch, shared by all kernels of a stream, and the tables of one step."""
        return RECOMMENDED_BYTES + TABLES_BYTES

    @abc.abstractmethod
    def _wrapper(self, workspace: Tensor) -> Any:
        """One of the library's wrappers."""

    @abc.abstractmethod
    def _fill(self, wrapper: Any, lengths: Lengths, wanted: Wanted) -> None:
        """Plan."""

    def _lengths_of(
        self, step: PagedStep, shape: tuple[int, ...], device: torch.device
    ) -> tuple[Lengths, int, Tensor | None]:
        q_offsets = query_offsets(step, shape[0] if shape else 1)
        longest = max(end - start for start, end in pairwise(q_offsets))
        blind = unseeing(q_offsets, step.lengths(), self._causal, device)
        return Lengths(int32(q_offsets), longest, pages_of(step, self.problem.page_size)), q_offsets[-1], blind


class Prefill(PagedWrapper):
    """FlashAttention-2 with tensor cores, keys split where the batch leaves multiprocessors idle."""

    backend = "fa2"

    def _wrapper(self, workspace: Tensor) -> Any:
        return BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout=self.problem.kv_layout, backend=self.backend)

    def _fill(self, wrapper: Any, lengths: Lengths, wanted: Wanted) -> None:
        problem, pages = self.problem, lengths.pages
        wrapper.plan(
            lengths.q_offsets,
            pages.offsets,
            pages.indices,
            pages.last,
            num_qo_heads=problem.num_q_heads,
            num_kv_heads=problem.num_kv_heads,
            head_dim_qk=problem.head_dim_qk,
            page_size=problem.page_size,
            max_token_per_sequence=lengths.longest,
            causal=self._causal,
            sm_scale=wanted.sm_scale,
            window_left=wanted.window_left,
            logits_soft_cap=wanted.softcap,
            **self._types,
        )


class PrefillHopper(Prefill):
    """FlashAttention-3's pipeline, a tile of queries per block."""

    backend = "fa3"


class Decode(PagedWrapper):
    """One query of each sequence on CUDA cores."""

    tensor_cores = False

    def _wrapper(self, workspace: Tensor) -> Any:
        return BatchDecodeWithPagedKVCacheWrapper(
            workspace, kv_layout=self.problem.kv_layout, use_tensor_cores=self.tensor_cores, backend="fa2"
        )

    def _fill(self, wrapper: Any, lengths: Lengths, wanted: Wanted) -> None:
        problem, pages = self.problem, lengths.pages
        wrapper.plan(
            pages.offsets,
            pages.indices,
            pages.last,
            problem.num_q_heads,
            problem.num_kv_heads,
            problem.head_dim_qk,
            problem.page_size,
            sm_scale=wanted.sm_scale,
            window_left=wanted.window_left,
            logits_soft_cap=wanted.softcap,
            **self._types,
        )


class DecodeTensorCores(Decode):
    """One query of each sequence, the rows of a group in one tile of tensor cores."""

    tensor_cores = True


def _one_token(device: torch.device) -> Lengths:
    return Lengths(int32([0, 1]), 1, first_page(device))
