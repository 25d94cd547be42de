"""From calls of `mqa_logits` and `paged_mqa_logits` to their Triton launches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.indexer.logits import logits_kernel, paged_logits_kernel
from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.requirements import has_float8
from kernelhub.ops.indexer.adapter import LogitsAdapter, PagedLogitsAdapter
from kernelhub.ops.indexer.problem import FP8, LogitsProblem

if triton.knobs.runtime.interpret:
    interpreter.repair()

# Queries that pass by one tile of keys. A tile costs as many bytes as two queries of 64 heads do.
# On an H200 1024 queries of 8192 keys take 0.163 ms by 16; by 32 or 64, by two or four queries in one product, by tiles
# of 64 or 256 keys, and with 2 stages they take 0.17 to 0.26.
_BLOCK_T = 16


class _Tiles(NamedTuple):
    """Keys of a program, its warps and its stages."""

    block_n: int
    num_warps: int
    num_stages: int


def _tiles(problem: LogitsProblem) -> _Tiles:
    """128 keys against 64 heads are 64 sums per thread of a warpgroup; the ahead-of-time report shows no spills."""
    heads, width = _padded(problem)
    if problem.dtype == "float32":  # multiplied without tensor cores; with 4 warps sm_89 spills 500 bytes
        return _Tiles(16, 8, 1)
    if width > 128 or heads > 64:
        return _Tiles(64, 4, 2)
    return _Tiles(128, 4, 3)


def _padded(problem: LogitsProblem) -> tuple[int, int]:
    """Heads and width as tensor cores take them: at least 16, and 32 bytes."""
    narrowest = 32 if problem.dtype == FP8 else 16
    return (
        max(16, triton.next_power_of_2(problem.num_heads)),
        max(narrowest, triton.next_power_of_2(problem.head_dim)),
    )


def _static(problem: LogitsProblem, tiles: _Tiles) -> dict[str, Any]:
    heads, width = _padded(problem)
    decodes = _decodes(problem)
    return {
        "HEADS": problem.num_heads,
        "H_PAD": heads,
        "D": problem.head_dim,
        "D_PAD": width,
        "BLOCK_N": tiles.block_n,
        "HAS_SCALE": problem.k_scale,
        "DECODES": decodes,
        "FACTOR": 65536.0 if decodes else 1.0,  # both operands are 256 times too small
        "PRECISION": "ieee",
    }


def _decodes(problem: LogitsProblem) -> bool:
    """float8 comes as bytes, because the tensor cores do not take it."""
    device = problem.device
    return problem.dtype == FP8 and not has_float8(device)


class Logits(LogitsAdapter):
    """A program for every tile of keys and block of queries."""

    def __init__(self, problem: LogitsProblem) -> None:
        super().__init__(problem)
        tiles = _tiles(problem)
        self._block_n = tiles.block_n
        self._decodes = _decodes(problem)
        static = {**_static(problem, tiles), "BLOCK_T": _BLOCK_T}
        self._repeated = Repeated()
        self._launch = Launcher(logits_kernel, static, tiles.num_warps, tiles.num_stages)

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
        given = (q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out)
        self._repeated.run(out.shape, _present(given), self._launch_anew, *given)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(given[-1].shape, _present(given))

    def _launch_anew(
        self,
        q: Tensor,
        k: Tensor,
        k_scale: Tensor | None,
        weights: Tensor,
        cu_seqlen_ks: Tensor,
        cu_seqlen_ke: Tensor,
        out: Tensor,
    ) -> None:
        if self._decodes:
            q, k = q.view(torch.uint8), k.view(torch.uint8)
        tokens, keys = out.shape
        strides = (
            *q.stride(),
            *k.stride(),
            0 if k_scale is None else k_scale.stride(0),
            *weights.stride(),
            cu_seqlen_ks.stride(0),
            cu_seqlen_ke.stride(0),
        )
        aligned = not (q.data_ptr() | k.data_ptr() | out.data_ptr()) & 15
        with on_device_of(out):
            self._launch(
                -(-keys // self._block_n) * -(-tokens // _BLOCK_T),
                (out.get_device(), strides, out.stride(1)) if aligned else None,
                q,
                k,
                k_scale,
                weights,
                cu_seqlen_ks,
                cu_seqlen_ke,
                out,
                tokens,
                keys,
                *strides,
                *out.stride(),
            )


def _present(given: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in given if tensor is not None)


class PagedLogits(PagedLogitsAdapter):
    """A program for every tile of keys of every sequence, for as many as `max_seq_len` allows."""

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        tiles = _tiles(problem)
        self._block_n = tiles.block_n
        self._decodes = _decodes(problem)
        static = {**_static(problem, tiles), "PAGE": problem.page_size}
        self._repeated = Repeated()
        self._launch = Launcher(paged_logits_kernel, static, tiles.num_warps, tiles.num_stages)

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
        given = (q, k_cache, k_scale_cache, weights, block_table, seq_lens, out)
        self._repeated.run(*self._identified(*given), self._launch_anew, *given)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(*self._identified(*given))

    def _identified(
        self, q: Tensor, k_cache: Tensor, k_scale_cache: Tensor | None, *more: Tensor
    ) -> tuple[Hashable, tuple[Tensor, ...]]:
        """The key of a call's launch, and its tensors. Scales behind the values of each page are where these are."""
        shape = more[-1].shape
        if k_scale_cache is None:
            return (shape, False), (q, k_cache, *more)
        pages = k_cache.shape[0]
        behind = k_cache.numel() // pages * k_cache.element_size() if pages else -1
        by_page = k_scale_cache.stride(0) * k_scale_cache.element_size(), k_scale_cache.stride(1)
        if (
            k_scale_cache.data_ptr() - k_cache.data_ptr() == behind
            and by_page == (k_cache.stride(0) * k_cache.element_size(), 1)
            and k_cache.stride(1) * k_cache.stride(2) == k_cache.shape[2]
        ):
            return (shape, True), (q, k_cache, *more)
        return (shape, False), (q, k_cache, k_scale_cache, *more)

    def _launch_anew(
        self,
        q: Tensor,
        k_cache: Tensor,
        k_scale_cache: Tensor | None,
        weights: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        out: Tensor,
    ) -> None:
        if self._decodes:
            q, k_cache = q.view(torch.uint8), k_cache.view(torch.uint8)
        columns, num_pages = out.shape[1], k_cache.shape[0]
        strides = (
            *q.stride(),
            *k_cache.stride(),
            *((0, 0) if k_scale_cache is None else k_scale_cache.stride()),
            *weights.stride(),
        )
        aligned = not (q.data_ptr() | k_cache.data_ptr() | out.data_ptr()) & 15
        with on_device_of(out):
            self._launch(
                -(-columns // self._block_n) * q.shape[0],
                (out.get_device(), strides, seq_lens.stride(0), out.stride(1)) if aligned else None,
                q,
                k_cache,
                k_scale_cache,
                weights,
                block_table,
                seq_lens,
                out,
                q.shape[1],
                columns,
                block_table.shape[1] * self.problem.page_size if num_pages else 0,  # there is no page to be read
                num_pages - 1,
                *strides,
                block_table.stride(0),
                seq_lens.stride(0),
                *out.stride(),
            )
