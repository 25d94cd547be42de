"""From a call of `mla_attention` to FlashMLA's attention to listed tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.flash_mla.library import library
from kernelhub.backends.flash_mla.requirements import LEGACY
from kernelhub.backends.flash_mla.results import VALUE_DIM, finish
from kernelhub.backends.flash_mla.slots import slots_kernel
from kernelhub.backends.shared.operands import aligned, is_aligned, on_device_of, positive_scale
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.mla.attention.adapter import MlaAdapter, MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem

_LIST_STEP = 128  # FlashMLA takes two blocks of 64 listed tokens at a time
_BLOCK = 512  # entries of a list that a program turns into slots at a time


class Sparse(MlaAdapter):
    """Every query token by itself, as FlashMLA's prefill does: the cache is one row of slots, the lists name them."""

    def __init__(self, problem: MlaProblem) -> None:
        super().__init__(problem)
        module, generation = library("sparse")
        self._run: Callable[..., tuple[Tensor, Tensor, Tensor]] = module.flash_mla_sparse_fwd
        self._more: dict[str, Any] = {"use_legacy": True} if generation == LEGACY else {}
        self._heads = 64 if problem.num_heads <= 64 else 128

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
        assert topk_indices is not None
        if step.num_seqs == 0:  # ragged, with tokens that belong to no sequence
            return
        uniform = q.ndim == 4
        sequences, tokens = q.shape[:2] if uniform else (1, q.shape[0]) if self.problem.ragged else (q.shape[0], 1)
        q, scale = positive_scale(q, values.scale)
        rows, rows_per_page = _rows_of(kv_cache)
        with on_device_of(q):
            slots, used = self._slots(topk_indices, step, tokens, rows_per_page)
            result, _, result_lse = self._run(
                self._queries(q), rows, slots, scale, VALUE_DIM, attn_sink=None, topk_length=used, **self._more
            )
            finish(
                result.view(sequences, tokens, *result.shape[1:]),
                result_lse.view(sequences, tokens, -1).transpose(1, 2),
                step,
                values.sinks,
                out,
                lse,
            )

    def _queries(self, q: Tensor) -> Tensor:
        """[T, heads, D] with as many heads as FlashMLA takes; what the added ones give is not looked at."""
        if q.ndim == 4:
            q = q.flatten(0, 1)
        if q.shape[1] == self._heads:
            return aligned(q)
        padded = q.new_empty(q.shape[0], self._heads, q.shape[2])
        padded[:, : q.shape[1]].copy_(q)
        return padded

    def _slots(self, topk_indices: Tensor, step: PagedStep, tokens: int, rows_per_page: int) -> tuple[Tensor, Tensor]:
        """int32 [T, 1, entries] slots of the cache, and how many entries of each are of use."""
        number, topk = topk_indices.shape
        padded = max(1, -(-topk // _LIST_STEP)) * _LIST_STEP
        slots = torch.empty(number, 1, padded, dtype=torch.int32, device=topk_indices.device)
        used = torch.empty(number, dtype=torch.int32, device=topk_indices.device)
        offsets = step.cu_seqlens_q
        slots_kernel[(number,)](
            slots,
            used,
            topk_indices,
            step.block_table,
            step.seq_lens,
            offsets,
            tokens,
            topk,
            padded,
            step.num_seqs,
            step.max_pages * self.problem.page_size,
            rows_per_page,
            *topk_indices.stride(),
            *step.block_table.stride(),
            step.seq_lens.stride(0),
            0 if offsets is None else offsets.stride(0),
            PAGE=self.problem.page_size,
            CAUSAL=self.problem.causal,
            RAGGED=offsets is not None,
            BLOCK=_BLOCK,
        )
        return slots, used

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        padded = max(1, -(-max_kv_len // _LIST_STEP)) * _LIST_STEP
        queries = 0 if self.problem.num_heads == self._heads else self._heads * self.problem.head_dim * 2
        return num_tokens * (4 * padded + 4 + queries + self._heads * (VALUE_DIM * 2 + 8))


def _rows_of(kv_cache: Tensor) -> tuple[Tensor, int]:
    """The cache as rows [slots, 1, D], and the number of rows from the beginning of a page to the next."""
    pages, page_size, width = kv_cache.shape
    page, row, entry = kv_cache.stride()
    apart = page // row if row else 0
    if (
        entry != 1
        or row < width
        or page % row
        or apart < page_size
        or pages * apart >= 1 << 31
        or not is_aligned(kv_cache)
    ):
        return aligned(kv_cache.contiguous()).view(pages * page_size, 1, width), page_size
    slots = (pages - 1) * apart + page_size if pages else 0
    return kv_cache.as_strided((slots, 1, width), (row, width, 1)), apart
