"""From a call of `mla_attention` to its CUDA launches."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from kernelhub.backends.cuda import library
from kernelhub.backends.cuda.mapped import Box, MappedKernel, rows_of
from kernelhub.backends.cuda.shapes import KINDS_OF_SINKS
from kernelhub.backends.shared.latent_rows import (
    cut,
    rows_of_pages,
    rows_of_queries,
    sums_bytes,
    sums_of_parts,
)
from kernelhub.backends.shared.operands import adjacent, on_device_of
from kernelhub.backends.shared.repeated_mla import RepeatedMla
from kernelhub.backends.shared.strides import strides_of_lse, strides_of_tokens
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem

_SOURCE = "sm_90/mla_decode.cu"
_LOG2E = math.log2(math.e)
_PAGE = 64
_DECODE = "TT" + "P" * 8 + "f" + "i" * 9 + "q" * 8
_MERGE = "P" * 6 + "i" * 7 + "q" * 6
_DECODE_THREADS, _MERGE_THREADS = 384, 128
_SHARED_BYTES = 231152  # of a block of `mla_decode`
_ASKS_FROM = 128  # heads, for whose arithmetic a pair of pages takes so long that more of them come ahead
_WARPS, _MOST_BLOCKS = 4, 2048  # of a block that merges, and blocks that run at once


class Decode(RepeatedMla):
    """Parts of equal work for as many programs as the device runs at once."""

    constants: ClassVar[dict[str, int]] = {}  # what differs from the form for so many heads
    alike = True  # whether sequences may be cut alike

    def __init__(self, problem: MlaProblem) -> None:
        super().__init__(problem)
        constants = {
            "HEADS": problem.num_heads,
            "CAUSAL": int(problem.causal),
            "HAS_LSE": int(problem.lse),
            "HAS_SINKS": int(problem.sinks),
            "PREFETCH": int(problem.num_heads >= _ASKS_FROM),
            **self.constants,
        }
        made = library.library(_SOURCE, constants, problem.device, specific=True)
        boxes = (Box((_PAGE, 64)),) * 2
        self._decode = MappedKernel(made, "mla_decode", _DECODE, _DECODE_THREADS, _SHARED_BYTES, boxes)
        self._merge = MappedKernel(made, "mla_merge", _MERGE, _MERGE_THREADS, 0, ())

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
        queries, q_rows = rows_of_queries(q, tokens, heads)
        room = step.max_pages * _PAGE if kv_cache.shape[0] else 0  # there is no page to be read
        if not kv_cache.shape[0]:  # but there has to be an address
            kv_cache = kv_cache.new_zeros(1, *kv_cache.shape[1:])
        pages, page_rows = rows_of_pages(kv_cache)
        tiles, parts = cut(rows, step.num_seqs, self.problem.device.num_sms, self.alike)
        part_out, part_lse = sums_of_parts(tiles, parts, q.device)
        in_vectors = out.stride(-1) == 1 and not (out.data_ptr() & 7 or any(s % 4 for s in out.stride()[:-1]))
        result = out if in_vectors else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        lengths, table = adjacent(step.seq_lens), adjacent(step.block_table)
        sinks = part_lse if values.sinks is None else values.sinks
        kind = 0 if values.sinks is None else KINDS_OF_SINKS[values.sinks.dtype]
        lse_of = part_lse if lse is None else lse
        strides = (*strides_of_tokens(result), *strides_of_lse(lse))
        each_block = 1  # of few rows four warps merge each
        if step.num_seqs * rows > _MOST_BLOCKS // 2:
            each_block = _WARPS * min(4, -(-step.num_seqs * rows // (_WARPS * _MOST_BLOCKS)))
        with on_device_of(q):
            self._decode(
                tiles * parts,
                rows_of(queries),
                rows_of(pages),
                result,
                lse_of,
                part_out,
                part_lse,
                sinks,
                table,
                lengths,
                pages,
                values.scale * _LOG2E,
                step.num_seqs,
                tokens,
                q_rows,
                page_rows,
                pages.shape[0],
                kv_cache.shape[0] - 1,
                room,
                tiles,
                kind,
                table.stride(0),
                pages.stride(0) * pages.element_size(),
                *strides,
            )
            self._merge(
                step.num_seqs * -(-rows // each_block),
                result,
                lse_of,
                part_out,
                part_lse,
                sinks,
                lengths,
                step.num_seqs,
                rows,
                parts,
                tiles,
                room,
                each_block,
                kind,
                *strides,
            )
            if result is not out:
                out.copy_(result)

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        return sums_bytes(self.problem.num_heads, num_seqs, num_tokens, self.problem.device.num_sms)
