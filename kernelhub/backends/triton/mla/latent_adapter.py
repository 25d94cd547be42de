"""From a call of `mla_attention` to its Triton launches."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.operands import adjacent, on_device_of
from kernelhub.backends.shared.repeated_mla import RepeatedMla
from kernelhub.backends.shared.strides import strides_of_lse
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.attention.splits import full_waves
from kernelhub.backends.triton.attention.strides import strides_of_rows
from kernelhub.backends.triton.attention.tiles import Tiles, power_of_two
from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.mla.latent import latent_kernel, merge_latent_kernel
from kernelhub.backends.triton.mla.tiles import latent_tiles
from kernelhub.backends.triton.requirements import has_float8
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.attention.problem import FEW, FP8, ONE
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem

if triton.knobs.runtime.interpret:
    interpreter.repair()

_LOG2E = math.log2(math.e)

# Fewest keys that are worth a program of their own: 128 rows of 576 in bfloat16 are 147 KB, some microseconds of one
# multiprocessor's share of the memory bandwidth.
CHUNK = 128
MOST_SPLITS = 64
FIXED_SPLITS = 16
PARTS = 16
_HALF_UNIT = 2.0**15  # of weights in float16, whose largest is then half of what it holds
_MOST_CUTS = 1024  # of calls, kept per adapter


class Grid(NamedTuple):
    """How a call is cut.

    Attributes:
        tiles: tiles of query rows over the whole batch, some of them empty if the queries are ragged.
        sizes: which tile shape.
        splits: parts that the keys of a tile may be cut into.
    """

    tiles: int
    sizes: Tiles
    splits: int


class SplitKV(RepeatedMla):
    """Tiles of query rows, their keys split so that every multiprocessor has work."""

    def __init__(self, problem: MlaProblem) -> None:
        super().__init__(problem)
        device = problem.device
        fp8 = problem.kv_dtype == FP8
        native = fp8 and has_float8(device)
        in_half = problem.q_dtype == "float16" or (fp8 and problem.q_dtype == "bfloat16")
        self._weight_unit = _HALF_UNIT if in_half else 1.0
        self._code_unit = 256.0 if fp8 and not native else 1.0  # e4m3_scaled
        self._shape = {
            "HEADS": problem.num_heads,
            "RAGGED": problem.ragged,
            "SPARSE": problem.sparse,
            "CAUSAL": problem.causal,
            "V": problem.value_dim,
            "V_PAD": power_of_two(problem.value_dim),
            "CHUNK": CHUNK,
            "HAS_SINKS": problem.sinks,
            "HAS_LSE": problem.lse,
        }
        self._scores = {
            "PAGE": problem.page_size,
            "R": problem.rope_dim,
            "R_PAD": power_of_two(max(1, problem.rope_dim)),
            "FP8": fp8,
            "NATIVE_FP8": native,
            "HALF": fp8 and problem.q_dtype == "bfloat16",
            "SCALE_ON_DEVICE": problem.kv_scale == "tensor",
            # Triton miscompiles two products into one accumulator on sm_10x, silently
            # (https://github.com/linkedin/Liger-Kernel/pull/1413, seen with Triton 3.7.1 on sm_103).
            "APART": device.family == "blackwell",
            "WEIGHT_UNIT": self._weight_unit,
            "PRECISION": "ieee",
        }
        self._launchers: dict[Tiles, tuple[Launcher, Launcher]] = {}
        self._cuts: dict[tuple[int, ...], tuple[Grid, Launcher, Launcher]] = {}

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
        problem, ragged = self.problem, self.problem.ragged
        tokens = 1 if q.ndim == 3 else q.shape[1]
        topk = 0 if topk_indices is None else topk_indices.shape[1]
        if step.num_seqs == 0:  # ragged, with tokens that belong to no sequence
            return
        num_pages = kv_cache.shape[0]
        room = step.max_pages * problem.page_size if num_pages else 0  # there is no page to be read
        kv_bound = topk if problem.sparse else room
        grid, launch, merge = self._cut(step.num_seqs, q.shape[0] * tokens, kv_bound)
        parts = grid.tiles * grid.sizes.block_m * grid.splits if grid.splits > 1 else 0
        part_out = torch.empty(parts, self._shape["V_PAD"], dtype=torch.float32, device=q.device)
        part_lse = torch.empty(parts, dtype=torch.float32, device=q.device)
        score_scale, value_scale = values.scale * _LOG2E * self._code_unit, self._code_unit / self._weight_unit
        if isinstance(values.kv_scale, float | int):
            score_scale, value_scale = score_scale * values.kv_scale, value_scale * values.kv_scale
        kv_cache = kv_cache.view(torch.uint8) if self._scores["FP8"] else kv_cache
        strides = (*strides_of_rows(q, ragged), *kv_cache.stride(), *strides_of_rows(out, ragged))
        sizes = (step.num_seqs, q.shape[0] if ragged else tokens, topk, grid.splits, room)
        lse_strides = strides_of_lse(lse, ragged)
        variant = _variant_of(q, kv_cache, out, values.sinks, strides)
        block_table, seq_lens = adjacent(step.block_table), adjacent(step.seq_lens)
        cu_seqlens_q = None if step.cu_seqlens_q is None else adjacent(step.cu_seqlens_q)
        with on_device_of(q):
            launch(
                grid.tiles * grid.splits,
                variant,
                q,
                kv_cache,
                out,
                lse,
                part_out,
                part_lse,
                values.sinks,
                values.kv_scale if isinstance(values.kv_scale, Tensor) else None,
                cu_seqlens_q,
                block_table,
                seq_lens,
                topk_indices,
                score_scale,
                value_scale,
                *sizes,
                num_pages - 1,
                *strides,
                *lse_strides,
                block_table.stride(0),
                *((0, 0) if topk_indices is None else topk_indices.stride()),
            )
            if grid.splits > 1:
                merge(
                    grid.tiles * grid.sizes.block_m,
                    variant,
                    out,
                    lse,
                    part_out,
                    part_lse,
                    values.sinks,
                    cu_seqlens_q,
                    seq_lens,
                    *sizes,
                    *strides[7:],
                    *lse_strides,
                )

    def grid(self, num_seqs: int, num_tokens: int, kv_bound: int) -> Grid:
        """How a call of these sizes is cut; `kv_bound` is the most keys that a tile may see."""
        problem = self.problem
        heads = problem.num_heads
        tokens = -(-num_tokens // max(1, num_seqs))  # of each sequence, where they are equal
        if problem.sparse:
            sizes = latent_tiles(problem, heads)
            tiles = num_tokens * -(-heads // sizes.block_m)
        elif problem.ragged:  # the lengths are on the device: a tile's size is that of the usual sequence
            sizes = latent_tiles(problem, heads if problem.q_len in (ONE, FEW) else 64 * heads)
            tiles = num_tokens * heads // sizes.block_m + num_seqs
        else:
            sizes = latent_tiles(problem, tokens * heads)
            tiles = num_seqs * -(-tokens * heads // sizes.block_m)
        return Grid(tiles, sizes, self.splits_for(tiles, tokens, sizes, kv_bound))

    def splits_for(self, tiles: int, tokens: int, sizes: Tiles, kv_bound: int) -> int:
        """Parts per tile that keep every multiprocessor at work, where keys suffice for that."""
        device = self.problem.device
        # A tile of 16 rows takes 98 KB of shared memory, one of 64 rows the larger part of all there is.
        at_once = 2 if sizes.block_m == 16 and device.shared_memory_bytes >= 200 << 10 else 1
        return full_waves(max(1, tiles), at_once * device.num_sms, max(1, min(MOST_SPLITS, -(-kv_bound // CHUNK))))

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        grid = self.grid(num_seqs, num_tokens, max_kv_len)
        parts = grid.tiles * grid.sizes.block_m * grid.splits if grid.splits > 1 else 0
        return parts * (power_of_two(self.problem.value_dim) + 1) * 4

    def _cut(self, *sizes: int) -> tuple[Grid, Launcher, Launcher]:
        """What `grid` gives, and its launchers, looked up: the layers of a step ask alike."""
        made = self._cuts.get(sizes)
        if made is None:
            if len(self._cuts) >= _MOST_CUTS:
                self._cuts.clear()
            grid = self.grid(*sizes)
            made = self._cuts[sizes] = (grid, *self._launchers_of(grid.sizes))
        return made

    def _launchers_of(self, tiles: Tiles) -> tuple[Launcher, Launcher]:
        made = self._launchers.get(tiles)
        if made is None:
            shape = {**self._shape, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
            made = self._launchers[tiles] = (
                Launcher(latent_kernel, {**shape, **self._scores}, tiles.num_warps, tiles.num_stages),
                Launcher(merge_latent_kernel, {**shape, "PARTS": PARTS}, num_warps=4),
            )
        return made


class SplitKVFixed(SplitKV):
    """The same with splits that depend on a tile's own keys only, so that its bits do too."""

    def splits_for(self, tiles: int, tokens: int, sizes: Tiles, kv_bound: int) -> int:
        problem = self.problem
        if problem.q_len not in (ONE, FEW):
            return 1
        most = FIXED_SPLITS // 4 if problem.ragged and problem.q_len == FEW else FIXED_SPLITS
        if not problem.ragged:
            most = max(1, most // tokens)  # the parts of many tokens are much memory
        return max(1, min(most, -(-kv_bound // CHUNK)))


def _variant_of(
    q: Tensor, kv_cache: Tensor, out: Tensor, sinks: Tensor | None, strides: tuple[int, ...]
) -> Hashable | None:
    """All that a compiled variant depends on beyond the problem; None where an operand is not aligned to 16 bytes."""
    if (q.data_ptr() | kv_cache.data_ptr() | out.data_ptr()) & 15:
        return None
    return (q.get_device(), None if sinks is None else sinks.dtype, strides)
