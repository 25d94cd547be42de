"""From a call of `attention` to FlashInfer's wrapper of packed sequences. Batches are sequences of one length."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper
from torch import Tensor

from kernelhub.backends.flashinfer.steps import (
    RECOMMENDED_BYTES,
    TABLES_BYTES,
    StepPlans,
    Wanted,
    attend,
    int32,
    unseeing,
    wanted_for,
)
from kernelhub.backends.shared.operands import aligned
from kernelhub.ops.attention.adapter import AttentionAdapter, DenseStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import ONE, AttentionProblem


class Offsets(NamedTuple):
    """int32 [num_seqs + 1] on the host: where the queries and the keys of each sequence begin."""

    q: Tensor
    k: Tensor


class Ragged(AttentionAdapter[AttentionProblem, DenseStep]):
    """FlashAttention-2 with tensor cores."""

    backend = "fa2"

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        dtype = getattr(torch, problem.q_dtype)
        self._types = {"q_data_type": dtype, "kv_data_type": dtype, "o_data_type": dtype}
        # A sole query sees all of its sequence, and causal masks are what windows were written for.
        self._causal = problem.causal or (problem.q_len == ONE and not problem.ragged)
        self._plans = StepPlans(self._wrapper, self._fill, self._lengths_of)
        if problem.device.type == "cuda":
            window_left, softcap = 0 if problem.window_left else -1, 1.0 if problem.softcap else 0.0
            self._plans.load(_one_token, Wanted((), 0, 1.0, window_left, softcap))

    def begin(self, step: DenseStep) -> None:
        if step.cu_seqlens_q is None:
            return
        step.q_offsets()
        step.k_offsets()
        self._plans.begin(step, step.cu_seqlens_q.device)

    def launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: DenseStep,
        values: Values,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        shape: tuple[int, ...] = ()
        if q.ndim == 4:
            shape = (q.shape[0], q.shape[1], k.shape[1])
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        elif step.num_seqs == 0:  # tokens that belong to no sequence
            return
        elif k.shape[0] != (last := step.k_offsets()[-1]):  # tiles reach into what follows, where zero times NaN is NaN
            k, v = k[:last], v[:last]
        if k.shape[0] == 0:  # there is an address to give, if nothing behind it
            k, v = k.new_zeros((1, *k.shape[1:])), v.new_zeros((1, *v.shape[1:]))
        wanted, factor = wanted_for(shape, values.scale, q.device, values.window_left, values.softcap)
        plan = self._plans.of(step, wanted, q.device)
        k, v, run = aligned(k), aligned(v), plan.lease.run
        attend(lambda q, **more: run(q, k, v, **more), plan, q, factor, out, lse)

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        """Scratch, shared by all kernels of a stream, and the tables of one step."""
        return RECOMMENDED_BYTES + TABLES_BYTES

    def _wrapper(self, workspace: Tensor) -> Any:
        return BatchPrefillWithRaggedKVCacheWrapper(workspace, kv_layout="NHD", backend=self.backend)

    def _fill(self, wrapper: Any, offsets: Offsets, wanted: Wanted) -> None:
        problem = self.problem
        wrapper.plan(
            offsets.q,
            offsets.k,
            num_qo_heads=problem.num_q_heads,
            num_kv_heads=problem.num_kv_heads,
            head_dim_qk=problem.head_dim_qk,
            head_dim_vo=problem.head_dim_vo,
            causal=self._causal,
            sm_scale=wanted.sm_scale,
            window_left=wanted.window_left,
            logits_soft_cap=wanted.softcap,
            **self._types,
        )

    def _lengths_of(
        self, step: DenseStep, shape: tuple[int, ...], device: torch.device
    ) -> tuple[Offsets, int, Tensor | None]:
        if shape:
            batch, q_len, k_len = shape
            q_offsets, k_offsets = ([length * place for place in range(batch + 1)] for length in (q_len, k_len))
        else:
            q_offsets, k_offsets = step.q_offsets(), step.k_offsets()
        blind = unseeing(q_offsets, [end - start for start, end in pairwise(k_offsets)], self._causal, device)
        return Offsets(int32(q_offsets), int32(k_offsets)), q_offsets[-1], blind


class RaggedHopper(Ragged):
    """FlashAttention-3's pipeline, a tile of queries per block."""

    backend = "fa3"


def _one_token(device: torch.device) -> Offsets:
    return Offsets(int32([0, 1]), int32([0, 1]))
