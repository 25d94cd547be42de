"""vLLM's builds of FlashAttention 2 and 3, called as the torch operators that their libraries register.

The package `vllm` is not imported. Its builds support ragged queries only (`Flattened`), and the one of FlashAttention
2 pages of 16 tokens or a multiple.
"""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.flash_attn import fa3
from kernelhub.backends.flash_attn.keyless import forget, with_keys
from kernelhub.backends.flash_attn.operands import (
    NO_LIMIT,
    Ends,
    FlashAdapter,
    bound_of_keys,
    bound_of_queries,
    keep_tail,
    one_length,
)
from kernelhub.backends.flash_attn.vllm_libraries import FA2, FA2_VARLEN, FA3, FA3_FORWARD
from kernelhub.backends.shared.operands import is_aligned, on_device_of
from kernelhub.backends.shared.operators import operator
from kernelhub.ops.attention.adapter import DenseStep, PagedStep, ProblemT, StepT
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import AttentionProblem, PagedAttentionProblem


class Flattened(FlashAdapter[ProblemT, StepT]):
    """Passes batched queries and keys as ragged ones of equal lengths. A subclass makes the call.

    Attributes:
        batches_over_pages: batched queries over pages are given as they are.
    """

    batches_over_pages = False

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, ends: Ends, values: Values, out: Tensor, wants_lse: bool
    ) -> Tensor | None:
        if ends.cu_seqlens_q is not None or (ends.page_table is not None and self.batches_over_pages):
            return self.ragged(q, k, v, ends, values, out, wants_lse)
        batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        flat = ends._replace(cu_seqlens_q=one_length(queries, batch, q), max_seqlen_q=queries)
        if ends.page_table is None:
            flat = flat._replace(cu_seqlens_k=one_length(keys, batch, q), max_seqlen_k=keys)
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        lse = self.ragged(q.flatten(0, 1), k, v, flat, values, target.flatten(0, 1), wants_lse)
        if target is not out:
            out.copy_(target)
        return None if lse is None else lse.unflatten(1, (batch, queries)).transpose(0, 1)

    @abc.abstractmethod
    def ragged(
        self, q: Tensor, k: Tensor, v: Tensor, ends: Ends, values: Values, out: Tensor, wants_lse: bool
    ) -> Tensor | None:
        """`attend` for ragged queries or over pages."""


class _Fa3(Flattened[ProblemT, StepT], fa3.FlashAttention3[ProblemT, StepT]):
    """Without attention in chunks; sinks, which it takes rounded to bfloat16, and context parallelism are left out."""

    batches_over_pages = True
    chunk = ()
    last = (None, 1, 0, None)

    def operator(self) -> Any:
        return operator(FA3, "fwd", FA3_FORWARD, self.problem.device.capability)

    def ragged(
        self, q: Tensor, k: Tensor, v: Tensor, ends: Ends, values: Values, out: Tensor, wants_lse: bool
    ) -> Tensor | None:
        with on_device_of(q):
            return fa3.FlashAttention3.attend(self, q, k, v, ends, values, out, wants_lse)


class Fa3Dense(_Fa3[AttentionProblem, DenseStep]):
    """`attention`, batched or ragged."""


class Fa3Paged(_Fa3[PagedAttentionProblem, PagedStep], fa3.Paged):
    """`paged_attention`, decode, prefill and mixed."""


class _Fa2(Flattened[ProblemT, StepT]):
    """Ragged calls, over keys or pages. Keys are not split.

    The operator for decode, `fwd_kvcache`, is left alone: it reads the lengths back to the host, which waits for the
    device and cannot be captured in a CUDA graph.
    """

    def __init__(self, problem: ProblemT) -> None:
        super().__init__(problem)
        capability = problem.device.capability
        self._varlen = operator(FA2, "varlen_fwd", FA2_VARLEN, capability)

    def ragged(
        self, q: Tensor, k: Tensor, v: Tensor, ends: Ends, values: Values, out: Tensor, wants_lse: bool
    ) -> Tensor | None:
        # A batch without a requested LSE has its LSE where it is written, also for sequences without keys.
        blind = None
        if ends.page_table is not None and (self.problem.ragged or wants_lse):
            ends, blind = with_keys(ends, k.shape[1], q.shape[0])
        # Where queries are few it writes into a view of the destination, which has to exist.
        direct = out.is_contiguous() and is_aligned(out)
        target = out if direct else torch.empty_like(out, memory_format=torch.contiguous_format)
        with on_device_of(q):
            lse = self.call(q, k, v, ends, values, target, wants_lse)
        if blind is not None:
            forget(blind, target, lse)
        if not direct:
            keep_tail(out, target, ends)
        return lse if wants_lse else None

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, ends: Ends, values: Values, target: Tensor, wants_lse: bool
    ) -> Tensor:
        """Run into `target`, and return the LSE."""
        causal = values.window_right == 0
        right = -1 if causal else min(values.window_right, NO_LIMIT)
        left = min(values.window_left, NO_LIMIT)
        longest = bound_of_queries(ends, q.shape[0], wants_lse)
        most_keys = bound_of_keys(ends.max_seqlen_q, ends.max_seqlen_k, values)
        # Offsets of keys are required over pages too, but not read.
        cu_seqlens_k = ends.cu_seqlens_q if ends.cu_seqlens_k is None else ends.cu_seqlens_k
        none = None
        made: list[Tensor] = self._varlen(
            q, k, v, target, ends.cu_seqlens_q, cu_seqlens_k, ends.seqused_k, none, ends.page_table, none,
            longest, most_keys, 0.0, values.scale, False, causal, left, right, values.softcap, False, 1, none,
        )  # fmt: skip
        return made[1]


class Fa2Dense(_Fa2[AttentionProblem, DenseStep]):
    """`attention`, batched or ragged."""


class Fa2Paged(_Fa2[PagedAttentionProblem, PagedStep]):
    """`paged_attention`, decode, prefill and mixed."""
