"""From a call of `mla_attention` to its Gluon launches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernelhub.backends.gluon.launch import Launcher, descriptor
from kernelhub.backends.gluon.mla.decode import decode_kernel
from kernelhub.backends.gluon.mla.merge import merge_kernel
from kernelhub.backends.shared.operands import adjacent, contiguous_copy, is_aligned, on_device_of
from kernelhub.backends.shared.repeated_mla import RepeatedMla
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem

_LOG2E = math.log2(math.e)
_ROWS = 64  # of a tile
_PAGE = 64
_LATENT, _WIDTH = 512, 576


class Decode(RepeatedMla):
    """Parts of equal work for as many programs as the device runs at once."""

    def __init__(self, problem: MlaProblem) -> None:
        super().__init__(problem)
        finish = {"HEADS": problem.num_heads, "HAS_SINKS": problem.sinks, "HAS_LSE": problem.lse}
        self._decode = Launcher(decode_kernel, {**finish, "CAUSAL": problem.causal})
        self._merge = Launcher(merge_kernel, finish, num_warps=1)

    def launch_anew(
        self,
        q: Tensor,
        kv_cache: Tensor,
        topk_indices: Tensor | None,
        step: PagedStep,
        values: MlaValues,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        heads = self.problem.num_heads
        tokens = 1 if q.ndim == 3 else q.shape[1]
        rows = tokens * heads
        queries, q_rows = _rows_of_queries(q, tokens, heads)
        pages, page_rows = _rows_of_pages(kv_cache)
        room = step.max_pages * _PAGE if kv_cache.shape[0] else 0  # there is no page to be read
        tiles, parts = self._cut(rows)
        slots = 2 * parts * tiles * _ROWS
        part_out = torch.empty(slots, _LATENT, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(slots, dtype=torch.float32, device=q.device)
        result = out if out.stride(-1) == 1 else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        lengths, table = adjacent(step.seq_lens), adjacent(step.block_table)
        sinks = part_lse if values.sinks is None else values.sinks
        lse_of = part_lse if lse is None else lse
        strides = (*_strides_of_tokens(result), *_strides_of_lse(lse, tokens))
        variant = (q.get_device(), sinks.dtype, result.data_ptr() % 16, *strides[:3])
        with on_device_of(q):
            self._decode(
                tiles * parts,
                variant,
                descriptor(queries, (_ROWS, _LATENT // 2)),
                descriptor(queries, (_ROWS, _WIDTH - _LATENT)),
                descriptor(pages, (_PAGE, _WIDTH - _LATENT)),
                result,
                lse_of,
                part_out,
                part_lse,
                sinks,
                table,
                lengths,
                values.scale * _LOG2E,
                step.num_seqs,
                tokens,
                q_rows,
                table.stride(0),
                page_rows,
                pages.shape[0],
                max(0, kv_cache.shape[0] - 1),
                room,
                tiles,
                *strides,
            )
            self._merge(
                step.num_seqs * rows,
                variant,
                result,
                lse_of,
                part_out,
                part_lse,
                sinks,
                lengths,
                None,
                step.num_seqs,
                rows,
                parts,
                tiles,
                room,
                *strides,
            )
            if result is not out:
                out.copy_(result)

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        tiles, parts = self._cut(-(-num_tokens // max(1, num_seqs)) * self.problem.num_heads)
        return 2 * parts * tiles * _ROWS * (_LATENT + 1) * 4

    def _cut(self, rows: int) -> tuple[int, int]:
        """Tiles of the rows of a sequence, and the parts of the work on each."""
        tiles = -(-rows // _ROWS)
        return tiles, max(1, self.problem.device.num_sms // tiles)


def _rows_of_queries(q: Tensor, tokens: int, heads: int) -> tuple[Tensor, int]:
    """q as rows [rows, 576], those of a sequence adjacent, and the rows between two sequences; or a copy."""
    sequence, row = q.stride(0), q.stride(-2)
    apart = tokens > 1 and q.stride(1) != heads * row
    if not is_aligned(q) or apart or sequence % row or sequence < tokens * heads * row:
        q = contiguous_copy(q)
        sequence, row = tokens * heads * _WIDTH, _WIDTH
    rows = (q.shape[0] - 1) * (sequence // row) + tokens * heads
    return q.as_strided((rows, _WIDTH), (row, 1)), sequence // row


def _rows_of_pages(kv_cache: Tensor) -> tuple[Tensor, int]:
    """The cache as rows [rows, 576], and the rows between two pages; copied where TMA cannot read it so."""
    if not kv_cache.shape[0]:  # no sequence has a key, but there has to be an address
        kv_cache = kv_cache.new_zeros(1, *kv_cache.shape[1:])
    page, row = kv_cache.stride(0), kv_cache.stride(1)
    if not is_aligned(kv_cache) or page % row or page < _PAGE * row:
        kv_cache = contiguous_copy(kv_cache)
        page, row = _PAGE * _WIDTH, _WIDTH
    rows = (kv_cache.shape[0] - 1) * (page // row) + _PAGE
    return kv_cache.as_strided((rows, _WIDTH), (row, 1)), page // row


def _strides_of_tokens(tensor: Tensor) -> tuple[int, int, int]:
    """(sequence, token, head) strides of out."""
    if tensor.ndim == 4:
        sequence, token, head, _ = tensor.stride()
        return sequence, token, head
    return tensor.stride(0), 0, tensor.stride(1)


def _strides_of_lse(lse: Tensor | None, tokens: int) -> tuple[int, int, int]:
    """(sequence, head, token) strides of the LSE, [H, sequences] or [sequences, H, tokens]."""
    if lse is None:
        return 0, 0, 0
    if lse.ndim == 3:
        sequence, head, token = lse.stride()
        return sequence, head, token
    return lse.stride(1), lse.stride(0), 0
