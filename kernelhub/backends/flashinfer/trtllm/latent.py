"""From a call of `mla_attention` to kernels that read block tables and lengths on the device: nothing is planned."""

from __future__ import annotations

import abc

import torch
from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla
from torch import Tensor

from kernelhub.backends.flashinfer.steps import RECOMMENDED_BYTES, split_scale, stream_of, workspace
from kernelhub.backends.shared.operands import aligned, on_device_of, row_major
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.mla.attention.adapter import MlaAdapter, MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem

_ROWS_AT_ONCE = 128  # of the cache: tables have as many pages as make up a multiple of them
_NOPE_DIM = 128  # width of a head before absorption, which is looked at and not used


class DeviceLatent(MlaAdapter):
    """As many queries of each sequence; each sees the keys up to its own.

    Scratch belongs to a stream: two graphs captured on one stream may not be replayed at once on two.
    """

    def __init__(self, problem: MlaProblem) -> None:
        super().__init__(problem)
        if problem.device.type == "cuda":  # one token, to load or compile the module, or to report that it is missing
            dtype, dims = self._q
            q = torch.zeros(1, 1, *dims, dtype=dtype, device="cuda")
            table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
            cache, out = q.new_zeros(1, *self._kv[1]), q.new_empty(1, 1, dims[0], problem.value_dim)
            with on_device_of(q):
                self._run(q, cache, self._pages(table, table[0] + 1), table[0] + 1, 1.0, out)

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
            q, out = q.unsqueeze(1), out.unsqueeze(1)
        sm_scale, factor = split_scale(values.scale)
        if factor != 1.0:
            q = q * factor
        tokens = q.shape[1]
        direct = out.is_contiguous() and not out.data_ptr() & 15
        made = out if direct else out.new_empty(out.shape)
        seq_lens = row_major(step.seq_lens)  # how the binaries load lengths is not known
        with on_device_of(q):  # the library reads the properties of the current device
            table = self._pages(step.block_table, seq_lens)
            self._run(aligned(q.contiguous()), aligned(kv_cache), table, seq_lens, sm_scale, made)
        last = torch.arange(1 - tokens, 1, dtype=torch.int32, device=q.device)
        blind = seq_lens[:, None] + last <= 0  # a query's position is that of the last one, or before it
        made.masked_fill_(blind[:, :, None, None], 0.0)
        if not direct:
            out.copy_(made)

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        """Scratch, shared by the kernels of a stream."""
        return RECOMMENDED_BYTES

    def _pages(self, block_table: Tensor, seq_lens: Tensor) -> Tensor:
        """The block table, widened; entries past a sequence's pages are replaced by its first page."""
        page = torch.arange(block_table.shape[1], dtype=torch.int32, device=block_table.device)
        first = torch.where(seq_lens[:, None] > 0, block_table[:, :1], 0)
        table = torch.where(page * self.problem.page_size < seq_lens[:, None], block_table, first).contiguous()
        missing = -table.shape[1] % max(1, _ROWS_AT_ONCE // self.problem.page_size)
        return torch.cat([table, first.expand(-1, missing)], 1) if missing else table

    @abc.abstractmethod
    def _run(self, q: Tensor, kv_cache: Tensor, table: Tensor, seq_lens: Tensor, sm_scale: float, out: Tensor) -> None:
        """The library's call: q and out are [num_seqs, tokens, H, D], without gaps."""


class TrtllmLatent(DeviceLatent):
    """TensorRT-LLM's kernels for Blackwell, which come as binaries."""

    def _run(self, q: Tensor, kv_cache: Tensor, table: Tensor, seq_lens: Tensor, sm_scale: float, out: Tensor) -> None:
        run_trtllm(self.problem, q, kv_cache, table, seq_lens, sm_scale, out)


class XqaLatent(DeviceLatent):
    """TensorRT-LLM's XQA for sm_120 and sm_121. The first 8 MB of its scratch are semaphores, zero at first."""

    def _run(self, q: Tensor, kv_cache: Tensor, table: Tensor, seq_lens: Tensor, sm_scale: float, out: Tensor) -> None:
        name = xqa_batch_decode_with_kv_cache_mla.__name__
        xqa_batch_decode_with_kv_cache_mla(
            q,
            kv_cache,
            workspace(name, q.device, stream_of(q.device)),
            _NOPE_DIM,
            self.problem.value_dim,
            self.problem.rope_dim,
            table,
            seq_lens,
            table.shape[1] * self.problem.page_size,
            out=out.squeeze(1),
            bmm1_scale=sm_scale,
            bmm2_scale=1.0,
        )


def run_trtllm(
    problem: MlaProblem,
    q: Tensor,
    kv_cache: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    out: Tensor,
    listed: int = 0,
) -> None:
    """The library's call.

    Args:
        problem: what it is for.
        q: [num_seqs, tokens, H, D], without gaps, as `out`.
        kv_cache: [num_pages, page_size, D].
        table: the block table, or slots of listed tokens, [num_seqs, tokens, listed].
        seq_lens: int32 [num_seqs], keys, or listed tokens that are seen.
        sm_scale: factor of the scores.
        out: where the result goes.
        listed: entries of a list, 0 for all tokens of a sequence.
    """
    name = trtllm_batch_decode_with_kv_cache_mla.__name__
    trtllm_batch_decode_with_kv_cache_mla(
        q,
        kv_cache,
        workspace(name, q.device, stream_of(q.device)),
        _NOPE_DIM,
        problem.value_dim,
        problem.rope_dim,
        table,
        seq_lens,
        listed or table.shape[1] * problem.page_size,
        sparse_mla_top_k=listed,
        out=out,
        bmm1_scale=sm_scale,
        bmm2_scale=1.0,
        backend="trtllm-gen",
        return_lse=False,
    )
