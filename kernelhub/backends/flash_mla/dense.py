"""From a call of `mla_attention` to FlashMLA's decode of all tokens of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.flash_mla.library import library
from kernelhub.backends.flash_mla.requirements import LEGACY, TENSORS
from kernelhub.backends.flash_mla.results import VALUE_DIM, finish
from kernelhub.backends.shared.operands import aligned, on_device_of, positive_scale, row_major
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.mla.attention.adapter import MlaAdapter, MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem


class Dense(MlaAdapter):
    """Decode whose schedule, which sequence is cut where, is made on the device by the first launch of a step."""

    def __init__(self, problem: MlaProblem) -> None:
        super().__init__(problem)
        module, self._generation = library("dense")
        self._run: Callable[..., tuple[Tensor, Tensor]] = module.flash_mla_with_kvcache
        self._metadata: Callable[..., Any] = module.get_mla_metadata

    def begin(self, step: PagedStep) -> None:
        """Let the step's launches share their schedule: it holds for these lengths only."""
        step.state = {}

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
        if q.ndim == 3:
            q = q.unsqueeze(1)
        q, pages = aligned(q), aligned(kv_cache)
        # Which the library loads one by one (csrc/sm90/decode/dense/splitkv_mla.cuh), so that they may begin anywhere.
        table, lengths = step.block_table, step.seq_lens
        if step.max_pages == 0:  # no sequence has a token; the kernel looks at a first page all the same
            table = table.new_zeros(step.num_seqs, 1)
        elif table.stride(1) != 1:
            table = row_major(table)
        if not lengths.is_contiguous():
            lengths = lengths.contiguous()
        q, scale = positive_scale(q, values.scale)
        with on_device_of(q):
            operands = (q, pages.unsqueeze(2), table, lengths, VALUE_DIM)
            result, result_lse = self._called(operands, self._schedule(step, q, lengths), scale)
            finish(result, result_lse, step, values.sinks, out, lse)

    def _called(self, operands: tuple[Any, ...], schedule: Any, scale: float) -> tuple[Tensor, Tensor]:
        causal = self.problem.causal
        if self._generation == TENSORS:
            return self._run(*operands, *schedule, softmax_scale=scale, causal=causal)
        if self._generation == LEGACY:
            return self._run(
                *operands, schedule, softmax_scale=scale, causal=causal, is_fp8_kvcache=False, use_legacy=True
            )
        return self._run(*operands, schedule, softmax_scale=scale, causal=causal, is_fp8_kvcache=False)

    def _schedule(self, step: PagedStep, q: Tensor, lengths: Tensor) -> Any:
        """The schedule of a step, one for each number of queries and each CUDA graph.

        A graph has to make its own, from the lengths of each replay, and what it made is no one else's.
        """
        capture = _capture_of(q)
        key = (q.shape[1], capture)
        schedule = step.state.get(key)
        if schedule is None:
            if self._generation == TENSORS:
                schedule = self._metadata(lengths, q.shape[1] * q.shape[2], 1)
            else:
                schedule = self._metadata()[0]
            if capture is not _UNKNOWN:
                step.state[key] = schedule
        return schedule

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        problem = self.problem
        tokens = -(-num_tokens // max(1, num_seqs))
        rows = tokens * problem.num_heads
        parts = num_seqs + max(1, problem.device.num_sms // -(-rows // 64))
        results = num_seqs * rows * (VALUE_DIM * 2 + 4)
        return results + parts * rows * (VALUE_DIM + 1) * 4


_UNKNOWN = object()


def _capture_of(tensor: Tensor) -> Hashable:
    """The identity of the CUDA graph that is being captured; None outside of a capture."""
    if not tensor.is_cuda or not torch.cuda.is_current_stream_capturing():
        return None
    try:
        from cuda.bindings import runtime
    except ImportError:
        return _UNKNOWN
    error, _, number, *_ = runtime.cudaStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream)
    return int(number) if error == runtime.cudaError_t.cudaSuccess else _UNKNOWN
