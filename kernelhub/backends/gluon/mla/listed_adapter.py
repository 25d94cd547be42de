"""From a call of `mla_attention` with lists of tokens to its Gluon launches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.gluon.language import VERSION
from kernelhub.backends.gluon.launch import Launcher, descriptor
from kernelhub.backends.gluon.mla.listed import listed_kernel
from kernelhub.backends.gluon.mla.listed_float8 import listed_float8_kernel
from kernelhub.backends.gluon.mla.merge import merge_kernel
from kernelhub.backends.shared.latent_rows import sums_of_parts
from kernelhub.backends.shared.operands import adjacent, aligned, contiguous_copy, on_device_of
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.mla.attention.adapter import MlaAdapter, MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem

_LOG2E = math.log2(math.e)
_ROWS = 64  # of a tile
_LATENT, _WIDTH = 512, 576


class Listed(MlaAdapter):
    """A query token with its list is what a sequence is to `Decode`."""

    def __init__(self, problem: MlaProblem) -> None:
        super().__init__(problem)
        finish = {"HEADS": problem.num_heads, "HAS_SINKS": problem.sinks, "HAS_LSE": problem.lse}
        self._decode = self._launcher(
            {**finish, "CAUSAL": problem.causal, "RAGGED": problem.ragged, "PAGE": problem.page_size}
        )
        self._merge = Launcher(merge_kernel, finish, num_warps=1)
        self._tiles = -(-problem.num_heads // _ROWS)
        self._parts = max(1, problem.device.num_sms // self._tiles)

    def _launcher(self, static: dict[str, Any]) -> Launcher:
        return Launcher(listed_kernel, static)

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
        problem, heads = self.problem, self.problem.num_heads
        tokens = 1 if q.ndim == 3 else q.shape[1]
        queries = aligned(q.reshape(-1, heads, _WIDTH))
        if queries.stride(0) % queries.stride(1):
            queries = queries.contiguous()
        count, between, row = queries.shape[0], queries.stride(0), queries.stride(1)
        q_rows = between // row
        rows = queries.as_strided(((count - 1) * q_rows + heads, _WIDTH), (row, 1))
        cache_room = step.max_pages * problem.page_size if kv_cache.shape[0] else 0
        if not cache_room:  # nothing is seen, but there has to be an address
            kv_cache = kv_cache.new_zeros(1, problem.page_size, _WIDTH)
        cache, units = self._rows(aligned(kv_cache))
        lists, lengths, table = adjacent(topk_indices), adjacent(step.seq_lens), adjacent(step.block_table)
        room, tiles, parts = lists.shape[1], self._tiles, self._parts
        part_out, part_lse = sums_of_parts(tiles, parts, q.device)
        result, result_lse = _flat_out(out, count, heads), _flat_lse(lse, count, heads, tokens)
        offsets = counted = step.cu_seqlens_q if problem.ragged else None
        if offsets is not None:
            counted = offsets.as_strided((1,), (1,), offsets.storage_offset() + step.num_seqs)
        sinks = part_lse if values.sinks is None else values.sinks
        lse_of = part_lse if result_lse is None else result_lse
        of_lse = (0, 0, 0) if result_lse is None else (result_lse.stride(1), result_lse.stride(0), 0)
        strides = (result.stride(0), 0, result.stride(1), *of_lse)
        variant = (q.get_device(), sinks.dtype, result.data_ptr() % 16, *strides[:3])
        with on_device_of(q):
            self._decode(
                tiles * parts,
                variant,
                descriptor(rows, (_ROWS, _LATENT // 2)),
                descriptor(rows, (_ROWS, _WIDTH - _LATENT)),
                cache,
                result,
                lse_of,
                part_out,
                part_lse,
                sinks,
                *self._kv_scale(values, part_lse),
                lists,
                table,
                lengths,
                offsets,
                *self._scales(values),
                count,
                step.num_seqs,
                tokens,
                q_rows,
                lists.stride(0),
                table.stride(0),
                *units,
                cache.shape[0] - 1,
                cache_room,
                room,
                tiles,
                *strides,
            )
            self._merge(
                count * heads,
                variant,
                result,
                lse_of,
                part_out,
                part_lse,
                sinks,
                None,
                counted,
                count,
                heads,
                parts,
                tiles,
                room,
                *strides,
            )
        if result.data_ptr() != out.data_ptr():
            out.copy_(result.view(out.shape))
        if lse is not None and result_lse is not None and result_lse.data_ptr() != lse.data_ptr():
            lse.copy_(result_lse.unflatten(1, (-1, tokens)).transpose(0, 1))

    def _rows(self, cache: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The cache as the kernel reads it, and how far pages and rows are apart."""
        return cache, (cache.stride(0) // 8, cache.stride(1) // 8)

    def _kv_scale(self, values: MlaValues, nothing: Tensor) -> tuple[Tensor, ...]:
        """The scale of the cache that is on the device, if the kernel takes one; `nothing` in the place of none."""
        return ()

    def _scales(self, values: MlaValues) -> tuple[float, ...]:
        """Factors of scores and of results."""
        return (values.scale * _LOG2E,)

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        return 2 * self._parts * self._tiles * _ROWS * (_LATENT + 1) * 4


class ListedFloat8(Listed):
    """The same over latents in float8."""

    # Of a thread of the second warpgroup and of one that converts; what three groups leave of 504 is the first's, 216.
    # So neither warpgroup spills in its loop; with 3.9.0 and 208 the second spills 5 to 9 words.
    registers = (216, 72) if VERSION >= (3, 9) else (208, 80)

    def _launcher(self, static: dict[str, Any]) -> Launcher:
        multiply, convert = self.registers
        more = {
            "SCALE_ON_DEVICE": self.problem.kv_scale == "tensor",
            "MULTIPLY_WITH": multiply,
            "CONVERT_WITH": convert,
        }
        return Launcher(listed_float8_kernel, {**static, **more})

    def _rows(self, cache: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        page, row = cache.stride(0), cache.stride(1)
        unit = math.gcd(page, row)
        if cache.shape[0] * (page // unit) >= 1 << 31:
            cache = contiguous_copy(cache)
            page, row, unit = cache.stride(0), _WIDTH, _WIDTH
        return cache.view(torch.int32), (unit // 16, page // unit, row // unit)

    def _kv_scale(self, values: MlaValues, nothing: Tensor) -> tuple[Tensor, ...]:
        return (values.kv_scale if isinstance(values.kv_scale, Tensor) else nothing,)

    def _scales(self, values: MlaValues) -> tuple[float, ...]:
        of_cache = 1.0 if values.kv_scale is None or isinstance(values.kv_scale, Tensor) else float(values.kv_scale)
        return values.scale * of_cache * _LOG2E, of_cache


def _flat_out(out: Tensor, count: int, heads: int) -> Tensor:
    """out as [tokens, H, 512], or memory that is copied into it."""
    if out.stride(-1) == 1 and (out.ndim == 3 or out.stride(0) == out.shape[1] * out.stride(1)):
        return out if out.ndim == 3 else out.as_strided((count, heads, _LATENT), out.stride()[1:])
    return torch.empty((count, heads, _LATENT), dtype=out.dtype, device=out.device)


def _flat_lse(lse: Tensor | None, count: int, heads: int, tokens: int) -> Tensor | None:
    """The LSE as [H, tokens], or memory that is copied into it."""
    if lse is None or lse.ndim == 2:
        return lse
    return torch.empty((heads, count), dtype=lse.dtype, device=lse.device)
