"""From a call of `attention` to TensorRT-LLM's prefill for heads of DeepSeek's widths."""

from __future__ import annotations

import torch
from flashinfer.prefill import trtllm_ragged_attention_deepseek
from torch import Tensor

from kernelhub.backends.flashinfer.steps import RECOMMENDED_BYTES, split_scale, stream_of, workspace
from kernelhub.backends.flashinfer.trtllm.packed import Packed, packed_dense, spread
from kernelhub.backends.shared.operands import aligned, on_device_of
from kernelhub.ops.attention.adapter import AttentionAdapter, DenseStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import ONE, AttentionProblem

_MOST_SHAPES = 8  # of the batched calls that share a step


class Ragged(AttentionAdapter[AttentionProblem, DenseStep]):
    """Packed sequences, or batches of sequences of one length, with heads of DeepSeek's widths."""

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        self._causal = problem.causal or (problem.q_len == ONE and not problem.ragged)
        if problem.device.type == "cuda":  # one token, to load the module or to report that it is missing
            dtype, dims = self._q
            q = torch.zeros(1, *dims, dtype=dtype, device="cuda")
            k, v = (q.new_zeros(1, *dims) for _, dims in (self._k, self._v))
            ends = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
            step = DenseStep(ends, ends, q_offsets=[0, 1], k_offsets=[0, 1])
            self.launch(q, k, v, step, Values(1.0), q.new_empty(1, dims[0], problem.head_dim_vo), None)

    def begin(self, step: DenseStep) -> None:
        if step.cu_seqlens_q is not None and step.num_seqs:
            self._at(step, (), step.cu_seqlens_q.device)

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
        at, keys = self._at(step, shape, q.device)
        if keys is not None:
            k, v = k[keys], v[keys]
        elif not shape and k.shape[0] != (last := step.k_offsets()[-1]):  # what follows may be NaN, and tiles reach it
            k, v = k[:last], v[:last]
        sm_scale, factor = split_scale(values.scale)
        stream = stream_of(q.device)

        def run(q: Tensor, out: Tensor) -> None:
            trtllm_ragged_attention_deepseek(
                q,
                aligned(k),
                aligned(v),
                workspace(trtllm_ragged_attention_deepseek.__name__, q.device, stream),
                at.kv_lens,
                at.most_q,
                at.most_kv,
                sm_scale,
                1.0,
                1.0,
                at.kv_lens.shape[0],
                -1,
                at.q_offsets,
                at.kv_offsets,
                None,
                self._causal,
                False,
                out=out,
                skip_all_rows_active_check=True,  # it would fetch the lengths from the device
            )

        with on_device_of(q):
            spread(run, at, q, factor, out)

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        """Scratch, shared by the kernels of a stream."""
        return RECOMMENDED_BYTES

    def _at(self, step: DenseStep, shape: tuple[int, ...], device: torch.device) -> tuple[Packed, Tensor | None]:
        """Where the step's queries are, and which keys they need, None for all; made once a step and shape."""
        known: dict[tuple[int, ...], tuple[Packed, Tensor | None]] | None = step.state
        if known is None:
            known = step.state = {}
        if shape not in known:
            if len(known) >= _MOST_SHAPES:
                known.clear()
            known[shape] = packed_dense(step, shape, self._causal, device)
        return known[shape]
