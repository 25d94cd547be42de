"""From a call of `mla_attention` to its Gluon launches."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from kernelhub.backends.gluon.launch import Launcher, descriptor
from kernelhub.backends.gluon.mla.decode import decode_kernel
from kernelhub.backends.gluon.mla.decode_float8 import decode_float8_kernel
from kernelhub.backends.gluon.mla.few_float8 import few_float8_kernel
from kernelhub.backends.gluon.mla.merge import merge_kernel
from kernelhub.backends.shared.operands import adjacent, aligned, contiguous_copy, is_aligned, on_device_of
from kernelhub.backends.shared.repeated_mla import RepeatedMla
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem

_LOG2E = math.log2(math.e)
_ROWS = 64  # of a tile
_FEW = 16  # rows of a sequence that have tiles of their own
_MANY_SEQS = 32  # from which on sequences are cut alike: with 8 of 8192 keys that took 3 % more
_PAGE = 64
_LATENT, _WIDTH = 512, 576
_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])


class Decode(RepeatedMla):
    """Parts of equal work for as many programs as the device runs at once."""

    alike = True  # whether sequences are cut alike where that leaves few multiprocessors idle

    def __init__(self, problem: MlaProblem) -> None:
        super().__init__(problem)
        finish = {"HEADS": problem.num_heads, "HAS_SINKS": problem.sinks, "HAS_LSE": problem.lse}
        self._decode = self._launcher({**finish, "CAUSAL": problem.causal})
        self._merge = Launcher(merge_kernel, finish, num_warps=1)

    def _launcher(self, static: dict[str, Any]) -> Launcher:
        return Launcher(decode_kernel, static)

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
        room = step.max_pages * _PAGE if kv_cache.shape[0] else 0  # there is no page to be read
        if not kv_cache.shape[0]:  # but there has to be an address
            kv_cache = kv_cache.new_zeros(1, *kv_cache.shape[1:])
        pages, units = self._pages(kv_cache)
        tiles, parts = self._cut(rows, step.num_seqs)
        slots = 2 * parts * tiles * _ROWS
        part_out = torch.empty(slots, _LATENT, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(slots, dtype=torch.float32, device=q.device)
        result = out if out.stride(-1) == 1 else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        lengths, table = adjacent(step.seq_lens), adjacent(step.block_table)
        sinks = part_lse if values.sinks is None else values.sinks
        lse_of = part_lse if lse is None else lse
        strides = (*_strides_of_tokens(result), *_strides_of_lse(lse, tokens))
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
        rows = -(-num_tokens // max(1, num_seqs)) * self.problem.num_heads
        # Fewer sequences may have more parts: see `_cut`, whose parts of all tiles are no more than this.
        most = max(self.problem.device.num_sms, -(-rows // _ROWS))
        return 2 * most * _ROWS * (_LATENT + 1) * 4

    def _form(self, rows: int) -> tuple[Launcher, int]:
        """The launcher for so many rows of a sequence, and how many of them it loads at once."""
        return self._decode, _ROWS

    def _pages(self, kv_cache: Tensor) -> tuple[Any, tuple[int, ...]]:
        """The cache as the kernel reads it, and how far its pages are apart."""
        rows, page_rows = _rows_of_pages(kv_cache)
        return descriptor(rows, (_PAGE, _WIDTH - _LATENT)), (page_rows, rows.shape[0])

    def _kv_scale(self, values: MlaValues, nothing: Tensor) -> tuple[Tensor, ...]:
        """The scale of the cache that is on the device, if the kernel takes one; `nothing` in the place of none."""
        return ()

    def _scales(self, values: MlaValues) -> tuple[float, ...]:
        """Factors of scores and of results."""
        return (values.scale * _LOG2E,)

    def _cut(self, rows: int, num_seqs: int) -> tuple[int, int]:
        """Tiles of the rows of a sequence, and the parts of the work on each of them.

        A part that begins within a sequence writes float32 sums, which are merged. Up to a twentieth of the
        multiprocessors are left idle where sequences of one length are then cut alike, or not at all.
        """
        tiles = -(-rows // _ROWS)
        most = max(1, self.problem.device.num_sms // tiles)
        if not self.alike or tiles == 1 or num_seqs < _MANY_SEQS:
            return tiles, most
        if num_seqs > most:
            parts = -(-num_seqs // -(-num_seqs // most))
        else:
            parts = most // num_seqs * num_seqs
        return tiles, parts if parts * 20 >= most * 19 else most


class DecodeFloat8(Decode):
    """The same over pages in float8."""

    # Of a thread of the second warpgroup and of one that converts; what three groups leave of 504 is the first's, 224.
    # With 3.9.0 and 208 the second spills 4 to 6 words.
    registers = (216, 64) if _VERSION >= (3, 9) else (208, 72)
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
