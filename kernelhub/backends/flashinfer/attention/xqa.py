"""From a call of `paged_attention` to TensorRT-LLM's kernels, as FlashInfer has them.

They read block tables and lengths on the device: nothing is planned.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from flashinfer.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from torch import Tensor

from kernelhub.backends.flashinfer.steps import RECOMMENDED_BYTES, alike, split_scale, stream_of, workspace
from kernelhub.backends.shared.operands import aligned, on_device_of, row_major
from kernelhub.ops.attention.adapter import AttentionAdapter, PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import PagedAttentionProblem


class Xqa(AttentionAdapter[PagedAttentionProblem, PagedStep]):
    """One query of each sequence; the rows of a group in one tile, keys split among blocks.

    Its semaphores are in scratch memory that is zero at first and that each launch leaves zero. It belongs to a stream:
    two graphs captured on one stream may not be replayed at once on two.
    """

    _run = staticmethod(xqa_batch_decode_with_kv_cache)
    _more: ClassVar[dict[str, Any]] = {}

    def __init__(self, problem: PagedAttentionProblem) -> None:
        super().__init__(problem)
        if problem.device.type == "cuda":  # one token, to load or compile the module
            dtype, dims = self._q
            q = torch.zeros(1, *dims, dtype=dtype, device="cuda")
            cache = q.new_zeros(1, *self._k[1])
            index = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
            sinks = q.new_zeros(dims[0]) if problem.sinks else None
            window_left = 0 if problem.window_left else -1
            self._decode(q, cache, cache, index, index[0] + 1, 1.0, window_left, sinks, torch.empty_like(q))

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
        sm_scale, factor = split_scale(values.scale)
        if factor != 1.0:
            q = q * factor
        direct = out.is_contiguous() and not out.data_ptr() & 15
        made = out if direct else out.new_empty(out.shape)
        self._decode(q, k, v, step.block_table, step.seq_lens, sm_scale, values.window_left, values.sinks, made)
        made.masked_fill_((step.seq_lens == 0).view(-1, 1, 1), 0.0)
        if not direct:
            out.copy_(made)

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        """Scratch, shared by the kernels of a stream, of which the first 8 MB are semaphores."""
        return RECOMMENDED_BYTES

    @staticmethod
    def _caches(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Caches as the kernel reads them: it counts strides in whole heads, and silently drops the rest."""
        k, v = alike(k, v)
        width = k.shape[-1]
        if any(stride % width for stride in k.stride()[:-1]):
            k, v = k.contiguous(), v.contiguous()
        return k, v

    def _decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        sm_scale: float,
        window_left: int,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        """The library's call: q and the metadata are contiguous, k and v have equal strides.

        XQA loads lengths and pages one by one (csrc/xqa/mhaUtils.cuh). How trtllm-gen does, which comes as binaries,
        is not known: metadata that does not begin at 16 bytes is copied for both.
        """
        device = q.device
        with on_device_of(q):  # it reads the properties of the current device
            self._run(
                aligned(q.contiguous()),
                self._caches(k, v),
                workspace(self._run.__name__, device, stream_of(device)),
                row_major(block_table),
                row_major(seq_lens),
                block_table.shape[1] * self.problem.page_size,
                bmm1_scale=sm_scale,
                bmm2_scale=1.0,
                window_left=window_left,
                out=out,
                sinks=None if sinks is None else row_major(sinks.to(torch.float32)),
                kv_layout=self.problem.kv_layout,
                q_len_per_req=1,
                **self._more,
            )


class TrtllmGen(Xqa):
    """TensorRT-LLM's kernels for Blackwell, which come as binaries."""

    _run = staticmethod(trtllm_batch_decode_with_kv_cache)
    _more: ClassVar[dict[str, Any]] = {"backend": "trtllm-gen"}
    _caches = staticmethod(alike)
