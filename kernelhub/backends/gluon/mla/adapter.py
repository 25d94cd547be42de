"""From a call of `mla_attention` to its Gluon launches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.gluon.language import VERSION
from kernelhub.backends.gluon.launch import Launcher, descriptor
from kernelhub.backends.gluon.mla.decode import decode_kernel
from kernelhub.backends.gluon.mla.decode_float8 import decode_float8_kernel
from kernelhub.backends.gluon.mla.few_float8 import few_float8_kernel
from kernelhub.backends.gluon.mla.merge import merge_kernel
from kernelhub.backends.shared.latent_rows import (
    cut,
    rows_of_pages,
    rows_of_queries,
    sums_bytes,
    sums_of_parts,
)
from kernelhub.backends.shared.operands import adjacent, aligned, on_device_of
from kernelhub.backends.shared.repeated_mla import RepeatedMla
from kernelhub.backends.shared.strides import strides_of_lse, strides_of_tokens
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem

_LOG2E = math.log2(math.e)
_ROWS = 64  # of a tile
_FEW = 16  # rows of a sequence that have tiles of their own
_PAGE = 64
_LATENT, _WIDTH = 512, 576


class Decode(RepeatedMla):
    """Parts of equal work for as many programs as the device runs at once."""

    alike = True  # whether sequences are cut alike where that leaves few multiprocessors idle

    def __init__(self, problem: MlaProblem) -> None:
        super().__init__(problem)
        finish = {"HEADS": problem.num_heads, "HAS_SINKS": problem.sinks, "HAS_LSE": problem.lse}
        self._decode = self._launcher({**finish, "CAUSAL": problem.causal})
        self._merge = Launcher(merge_kernel, finish, num_warps=1)

    def _launcher(self, static: dict[str, Any]) -> Launcher:
        # With 3.8 and 240 the first warpgroup, which has what is left, spills two words in its loop.
        return Launcher(decode_kernel, {**static, "MULTIPLY_WITH": 232 if VERSION == (3, 8) else 240})

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
        pages, units = self._pages(kv_cache)
        tiles, parts = self._cut(rows, step.num_seqs)
        part_out, part_lse = sums_of_parts(tiles, parts, q.device)
        result = out if out.stride(-1) == 1 else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        lengths, table = adjacent(step.seq_lens), adjacent(step.block_table)
        sinks = part_lse if values.sinks is None else values.sinks
        lse_of = part_lse if lse is None else lse
        strides = (*strides_of_tokens(result), *strides_of_lse(lse))
        variant = (q.get_device(), sinks.dtype, result.data_ptr() % 16, *strides[:3])
        decode, height = self._form(rows)
        with on_device_of(q):
            decode(
                tiles * parts,
                variant,
                descriptor(queries, (height, _LATENT // 2)),
                descriptor(queries, (height, _WIDTH - _LATENT)),
                pages,
                result,
                lse_of,
                part_out,
                part_lse,
                sinks,
                *self._kv_scale(values, part_lse),
                table,
                lengths,
                *self._scales(values),
                step.num_seqs,
                tokens,
                q_rows,
                table.stride(0),
                *units,
                kv_cache.shape[0] - 1,
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
        return sums_bytes(self.problem.num_heads, num_seqs, num_tokens, self.problem.device.num_sms)

    def _form(self, rows: int) -> tuple[Launcher, int]:
        """The launcher for so many rows of a sequence, and how many of them it loads at once."""
        return self._decode, _ROWS

    def _pages(self, kv_cache: Tensor) -> tuple[Any, tuple[int, ...]]:
        """The cache as the kernel reads it, and how far its pages are apart."""
        rows, page_rows = rows_of_pages(kv_cache)
        return descriptor(rows, (_PAGE, _WIDTH - _LATENT)), (page_rows, rows.shape[0])

    def _kv_scale(self, values: MlaValues, nothing: Tensor) -> tuple[Tensor, ...]:
        """The scale of the cache that is on the device, if the kernel takes one; `nothing` in the place of none."""
        return ()

    def _scales(self, values: MlaValues) -> tuple[float, ...]:
        """Factors of scores and of results."""
        return (values.scale * _LOG2E,)

    def _cut(self, rows: int, num_seqs: int) -> tuple[int, int]:
        return cut(rows, num_seqs, self.problem.device.num_sms, self.alike)


class DecodeFloat8(Decode):
    """The same over pages in float8."""

    # Of a thread of the second warpgroup and of one that converts; what three groups leave of 504 is the first's, 224.
    # With 3.9.0 and 208 the second spills 4 to 6 words.
    registers = (216, 64) if VERSION >= (3, 9) else (208, 72)
    alike = False  # it was not measured
    few = True  # whether a kernel of its own takes few rows of a sequence
    registers_of_few = (152, 200)

    def _launcher(self, static: dict[str, Any]) -> Launcher:
        of_both = {**static, "SCALE_ON_DEVICE": self.problem.kv_scale == "tensor"}
        multiply, convert = self.registers_of_few
        few = {"MULTIPLY_WITH": multiply, "CONVERT_WITH": convert, "ROWS": _FEW}
        self._decode_few = Launcher(few_float8_kernel, {**of_both, **few})
        multiply, convert = self.registers
        tiles = {"MULTIPLY_WITH": multiply, "CONVERT_WITH": convert}
        return Launcher(decode_float8_kernel, {**of_both, **tiles})

    def _form(self, rows: int) -> tuple[Launcher, int]:
        return (self._decode_few, _FEW) if self.few and rows <= _FEW else (self._decode, _ROWS)

    def _pages(self, kv_cache: Tensor) -> tuple[Any, tuple[int, ...]]:
        cache = aligned(kv_cache)
        page, row = cache.stride(0), cache.stride(1)
        return cache.view(torch.int32), (page // 16, row // 16)

    def _kv_scale(self, values: MlaValues, nothing: Tensor) -> tuple[Tensor, ...]:
        return (values.kv_scale if isinstance(values.kv_scale, Tensor) else nothing,)

    def _scales(self, values: MlaValues) -> tuple[float, ...]:
        of_cache = 1.0 if values.kv_scale is None or isinstance(values.kv_scale, Tensor) else float(values.kv_scale)
        return values.scale * of_cache * _LOG2E, of_cache
