"""`mqa_logits` and `paged_mqa_logits`. The library makes its results itself, in rows with gaps: they are copied out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.deep_gemm.loaded import function
from kernelhub.backends.shared.operands import on_device_of, row_major
from kernelhub.ops.indexer.adapter import LogitsAdapter, PagedLogitsAdapter
from kernelhub.ops.indexer.layout import SCALE_BYTES, fuse_cache
from kernelhub.ops.indexer.problem import LogitsProblem, PagedLogitsProblem


class Logits(LogitsAdapter):
    """Keys in one row after another."""

    def __init__(self, problem: LogitsProblem) -> None:
        super().__init__(problem)
        self._logits = function("mqa_logits")

    def launch(
        self,
        q: Tensor,
        k: Tensor,
        k_scale: Tensor | None,
        weights: Tensor,
        cu_seqlen_ks: Tensor,
        cu_seqlen_ke: Tensor,
        out: Tensor,
    ) -> None:
        keys = k.shape[0]
        scale = torch.ones(keys, device=k.device, dtype=torch.float32) if k_scale is None else row_major(k_scale)
        starts = cu_seqlen_ks.clamp(0, keys)
        ends = torch.maximum(cu_seqlen_ke.clamp(max=keys), starts)
        with on_device_of(out):
            made = self._logits(
                row_major(q), (row_major(k), scale), row_major(weights), starts, ends, clean_logits=True
            )
        out.copy_(_tensor(made))


class PagedLogits(PagedLogitsAdapter):
    """Keys in pages that contain their scales. Used pages with separate scales are gathered first.

    The kernel takes one or two tokens of a sequence at a time, each with a length of its own: more of them are given as
    several sequences. It scores whole pages, so scores past a token's length are masked here.
    """

    def __init__(self, problem: PagedLogitsProblem) -> None:
        super().__init__(problem)
        self._logits = function("paged_mqa_logits")
        self._metadata = function("paged_metadata")
        self._num_sms = function("num_sms")

    def launch(
        self,
        q: Tensor,
        k_cache: Tensor,
        k_scale_cache: Tensor | None,
        weights: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        out: Tensor,
    ) -> None:
        _, next_n, heads, width = q.shape
        columns, page = out.shape[1], self.problem.page_size
        most = min(columns, block_table.shape[1] * page)
        if not most or not k_cache.shape[0]:
            out.fill_(-torch.inf)
            return
        table = block_table.clamp(0, k_cache.shape[0] - 1)  # entries of unused pages may hold anything
        behind = torch.arange(1 - next_n, 1, dtype=torch.int32, device=out.device)
        lens = (seq_lens.unsqueeze(1) + behind).clamp_(0, most)
        pages = _fused_view(k_cache, k_scale_cache)
        if pages is None:
            pages, table = _gathered(k_cache, k_scale_cache, table)
        together = 2 if next_n % 2 == 0 else 1
        if next_n > together:
            table = table.unsqueeze(1).expand(-1, next_n // together, -1).flatten(0, 1)
        known = lens.clamp(min=1).view(-1, together)
        with on_device_of(out):
            plan = self._metadata(known, page, int(self._num_sms()))
            made = self._logits(
                row_major(q).view(-1, together, heads, width),
                pages,
                row_major(weights),
                known,
                row_major(table),
                plan,
                most,
                clean_logits=False,
                indices=None,
            )
        seen = torch.arange(columns, dtype=torch.int32, device=out.device) < lens.view(-1, 1)
        scored = _tensor(made)
        if most < columns:
            out[:, most:] = -torch.inf
        unseen = torch.full((), -torch.inf, device=out.device, dtype=torch.float32)
        torch.where(seen[:, :most], scored[:, :most], unseen, out=out[:, :most])


def _fused_view(k_cache: Tensor, k_scale_cache: Tensor | None) -> Tensor | None:
    """The pages [P, page, 1, D + 4] of bytes that both are views of; None where they are not of one."""
    pages, page, width = k_cache.shape
    if k_scale_cache is None or k_cache.stride()[1:] != (width, 1) or k_scale_cache.stride()[1] != 1:
        return None
    apart = k_cache.stride(0)
    together = k_scale_cache.data_ptr() - k_cache.data_ptr() == page * width
    if not together or k_scale_cache.stride(0) * SCALE_BYTES != apart or k_cache.data_ptr() % 16 or apart % 16:
        return None
    row = width + SCALE_BYTES
    if k_cache.untyped_storage().data_ptr() != k_scale_cache.untyped_storage().data_ptr() or apart < page * row:
        return None
    return k_cache.view(torch.uint8).as_strided((pages, page, 1, row), (apart, row, row, 1))


def _gathered(k_cache: Tensor, k_scale_cache: Tensor | None, table: Tensor) -> tuple[Tensor, Tensor]:
    """The pages of the table, values and scales together, and the table that says where they are now."""
    used = table.reshape(-1).long()
    values = k_cache.view(torch.uint8).index_select(0, used).view(k_cache.dtype)
    if k_scale_cache is None:
        scales = torch.ones(values.shape[:2], device=values.device, dtype=torch.float32)
    else:
        scales = k_scale_cache.index_select(0, used)
    places = torch.arange(used.shape[0], dtype=torch.int32, device=table.device).view(table.shape)
    return fuse_cache(values, scales), places


def _tensor(made: Any) -> Tensor:
    """The library's result as a tensor; tvm-ffi may have wrapped it."""
    return made if isinstance(made, Tensor) else torch.utils.dlpack.from_dlpack(made)
