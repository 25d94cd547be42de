"""From an attention call to its Triton launches: static arguments are fixed per problem, the others are passed."""

from __future__ import annotations

import abc
import math
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.repeated_attention import RepeatedAttention
from kernelhub.backends.shared.strides import strides_of_lse
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.attention.prefill import prefill_kernel
from kernelhub.backends.triton.attention.split_kv import merge_kernel, split_kernel
from kernelhub.backends.triton.attention.splits import (
    FEW,
    FEW_AT_ONCE,
    FEW_FULL,
    FEW_PARTS,
    FEW_PROGRAMS,
    HOPPER,
    MEASURED_ROWS,
    Division,
    Kind,
    cheapest,
    fewest_keys,
    full_waves,
    shared,
)
from kernelhub.backends.triton.attention.strides import strides_of_operands, variant_of
from kernelhub.backends.triton.attention.tiles import Tiles, power_of_two, prefill_tiles, query_widths, split_tiles
from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.requirements import has_float8
from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import E5M2, FP8, ONE, QUANTISED, AttentionProblem, PagedAttentionProblem
from kernelhub.runtime.counters import counters_of, no_counters

if triton.knobs.runtime.interpret:
    interpreter.repair()

_LOG2E = math.log2(math.e)
_HALVES = ("float16", "bfloat16")

# Fewest keys that are worth a program of their own: with 128-wide bfloat16 heads 256 keys are 128 KB, some
# microseconds of one multiprocessor's share of the memory bandwidth.
CHUNK = 256
# Whether the lengths of a batch, which are on the device, share its keys out. Time over that of the host's parts on an
# H200, lengths of ShareGPT-like requests: 8, 32, 64, 128 and 256 sequences 0.88, 0.51, 0.57, 0.88 and 0.88, fp8 keys
# 0.86, 0.47, 0.60, 0.89 and 0.90. Equal lengths of 4096 keys and more: 0.98 to 1.05, fp8 0.93 to 1.09; of 1024 and 2048
# 0.90 to 1.08, fp8 0.82 to 1.10 (benchmarks/results/splits_rule_h200.json).
BALANCE = True
UNEQUAL = 4 * CHUNK  # of sequences of no more keys each has few parts anyway
MOST_SPLITS = 64
FIXED_SPLITS = 16
NO_LIMIT = 1 << 30  # a wider window sees everything; sums of positions stay within 32 bits
PARTS = 16
ASSUMED_KIB = 56  # that a program keeps filling, of tiles that were not measured
# Whether one launch makes and merges few parts.
ONE_LAUNCH = True
# The last program of a sequence merges few parts: up to so many reads one after another, each of so many elements for
# a warp. Where lengths share keys out, few sequences have many parts, so more reads are worth the launch that they
# spare. Reads of more elements are fewer, but can take registers from all programs: as many as leave room for the
# programs that `splits.HOPPER` counts on, by bytes of an element of the cache. The tiles of `splits.FEW` have registers
# to spare.
MOST_READS = 4
MOST_READS_OF_FEW = 32
MERGED_ELEMENTS = 256
_TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
MERGED_ELEMENTS_OF_HOPPER = {1: 512, 2: 256} if _TRITON >= (3, 7) else {1: 1024, 2: 1024}
MERGED_ELEMENTS_OF_FEW = 2048


class Geometry(NamedTuple):
    """Sizes and metadata of one call, the same for every form of it.

    Attributes:
        num_seqs: sequences.
        q_tokens: queries per sequence; of all sequences if ragged.
        kv_tokens: keys per sequence of batched tensors; of all of them if ragged; of pages what a row of the block
            table has room for, 0 if the cache has no page.
        kv_bound: no sequence has more keys.
        q_bound: no sequence has more queries.
        cu_seqlens_q, cu_seqlens_k, block_table, seq_lens: those that the form has.
        table_stride: elements between rows of the block table.
        last_page: of the cache.
    """

    num_seqs: int
    q_tokens: int
    kv_tokens: int
    kv_bound: int
    q_bound: int
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    block_table: Tensor | None = None
    seq_lens: Tensor | None = None
    table_stride: int = 0
    last_page: int = 0


class TritonAttention(RepeatedAttention):
    """Shared by the Triton kernels of both ops. A subclass selects the kernels."""

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        d0, d1 = query_widths(problem)
        device = problem.device
        self.page_size = problem.page_size if isinstance(problem, PagedAttentionProblem) else 0
        self.heads_first = isinstance(problem, PagedAttentionProblem) and problem.kv_layout == "HND"
        self.fp8 = problem.kv_dtype in QUANTISED
        self.shape = {
            "KV_HEADS": problem.num_kv_heads,
            "GROUP": problem.group_size,
            "RAGGED": problem.ragged,
            "PAGE": self.page_size,
            "DV": problem.head_dim_vo,
            "DV_PAD": power_of_two(problem.head_dim_vo),
            "HAS_LEFT": problem.window_left,
            "HAS_RIGHT": problem.causal or problem.window_right,
            "HAS_SINKS": problem.sinks,
            "HAS_LSE": problem.lse,
        }
        widest = max(power_of_two(problem.head_dim_qk), power_of_two(problem.head_dim_vo))
        self._itemsize = itemsize = 1 if self.fp8 else 2  # of the cache, as rules of tiles count
        measured = problem.q_dtype in _HALVES and (self.fp8 or problem.q_dtype == problem.kv_dtype)
        measured = measured and device.family == "hopper"
        self._kinds: tuple[Kind, ...] = HOPPER.get((itemsize, max(64, widest)), ()) if measured else ()
        self._few: Tiles | None = FEW.get((itemsize, widest)) if measured and self.page_size else None
        # Of other dtypes the code that merges takes registers from all programs, or spills.
        registers = problem.kv_dtype == problem.q_dtype or (problem.kv_dtype == FP8 and widest <= 128)
        self._balances = BALANCE and (problem.ragged or self.page_size > 0)
        self._may_merge = ONE_LAUNCH and problem.q_dtype in _HALVES and registers
        self._row_bytes = itemsize * (problem.head_dim_qk + problem.head_dim_vo)
        self._tiles: dict[int, Tiles] = {}
        self._prepared: set[Hashable] = set()
        self._launchers: dict[Any, Any] = {}
        self.scores = {
            "D": problem.head_dim_qk,
            "D0": d0,
            "D1": d1,
            "HAS_SOFTCAP": problem.softcap,
            "FP8": {FP8: 1, E5M2: 2}.get(problem.kv_dtype, 0),
            "NATIVE_FP8": problem.kv_dtype == E5M2 or (self.fp8 and has_float8(device)),
            "SCALES": {"tensor": 1, "head": 2}.get(problem.kv_scale or "", 0),
            "PRECISION": "ieee",
        }

    def _launch_anew(
        self, q: Tensor, k: Tensor, v: Tensor, step: Any, values: Values, out: Tensor, lse: Tensor | None
    ) -> None:
        with on_device_of(q):
            self.run(q, k, v, self.geometry(q, k, step), values, out, lse)

    @abc.abstractmethod
    def run(
        self, q: Tensor, k: Tensor, v: Tensor, at: Geometry, values: Values, out: Tensor, lse: Tensor | None
    ) -> None:
        """Launch the kernels on the current device, which is that of the operands."""

    def geometry(self, q: Tensor, k: Tensor, step: DenseStep | PagedStep) -> Geometry:
        """Sizes and metadata of a call in any form."""
        if isinstance(step, PagedStep):
            tokens = q.shape[1] if q.ndim == 4 else q.shape[0] if self.problem.ragged else 1
            num_pages = k.shape[0]
            room = step.max_pages * self.page_size if num_pages else 0  # there is no page to be read
            return Geometry(
                step.num_seqs,
                tokens,
                min(room, NO_LIMIT),
                room,
                tokens if step.max_seqlen_q is None else step.max_seqlen_q,
                step.cu_seqlens_q,
                None,
                step.block_table,
                step.seq_lens,
                step.block_table.stride(0),
                num_pages - 1,
            )
        if step.cu_seqlens_q is None:
            return Geometry(q.shape[0], q.shape[1], k.shape[1], k.shape[1], q.shape[1])
        kv_bound = k.shape[0] if step.max_seqlen_k is None else step.max_seqlen_k
        q_bound = q.shape[0] if step.max_seqlen_q is None else step.max_seqlen_q
        return Geometry(step.num_seqs, q.shape[0], k.shape[0], kv_bound, q_bound, step.cu_seqlens_q, step.cu_seqlens_k)

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        at: Geometry,
        values: Values,
        out: Tensor,
        lse: Tensor | None,
        min_rows: int,
    ) -> None:
        """One pass over all sequences of more than `min_rows` query rows."""
        k, v, score_scale, value_scale = self._scaled(k, v, values)
        tiles, launch = self._prefill_launcher(sign_of(score_scale), min_rows)
        group, kv_heads = self.problem.group_size, self.problem.num_kv_heads
        if self.problem.ragged:
            programs = (at.q_tokens * group // tiles.block_m + at.num_seqs) * kv_heads
        else:
            programs = -(-at.q_tokens * group // tiles.block_m) * kv_heads * at.num_seqs
        strides = strides_of_operands(q, k, v, out, self.problem.ragged, self.heads_first)
        launch(
            programs,
            variant_of(q, k, v, out, values.sinks, strides),
            q,
            k,
            v,
            out,
            lse,
            values.sinks,
            values.k_scale if isinstance(values.k_scale, Tensor) else None,
            values.v_scale if isinstance(values.v_scale, Tensor) else None,
            at.cu_seqlens_q,
            at.cu_seqlens_k,
            at.block_table,
            at.seq_lens,
            score_scale,
            value_scale,
            float(values.softcap),
            at.num_seqs,
            at.q_tokens,
            at.kv_tokens,
            at.last_page,
            min(values.window_left, NO_LIMIT),
            min(values.window_right, NO_LIMIT),
            *strides,
            *strides_of_lse(lse, self.problem.ragged),
            at.table_stride,
        )

    def _prefill_launcher(self, sign: int, min_rows: int) -> tuple[Tiles, Launcher]:
        made = self._launchers.get(("prefill", sign, min_rows))
        if made is None:
            tiles = prefill_tiles(self.problem)
            static = {
                **self.shape,
                **self.scores,
                "SIGN": sign,
                "BLOCK_M": tiles.block_m,
                "BLOCK_N": tiles.block_n,
                "MIN_ROWS": min_rows,
            }
            made = tiles, Launcher(prefill_kernel, static, tiles.num_warps, tiles.num_stages)
            self._launchers["prefill", sign, min_rows] = made
        return made

    def split(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        at: Geometry,
        values: Values,
        out: Tensor,
        lse: Tensor | None,
        rows: int,
        division: Division,
    ) -> None:
        """Sequences of up to `rows` query rows, their keys in parts, which are then merged.

        The first call of a variant compiles the other kinds of tiles, too: another batch may select those. So it does
        the second kernel, which other calls may need: those of more parts, and of streams without counters.
        """
        launches = list(self._split_launches(q, k, v, at, values, out, lse, rows, division))
        for launcher, *given in launches:
            launcher(*given)
        variant = launches[0][2]
        kinds = {kind.tiles for kind in self._kinds if division.tiles.block_m == MEASURED_ROWS}
        if kinds and self._few:
            kinds.add(self._few)
        if variant not in self._prepared:
            self._prepared.add(variant)
            for tiles in kinds | {division.tiles}:
                both = Division(tiles, 2)
                for launcher, *given in self._split_launches(q, k, v, at, values, out, lse, rows, both, two=True):
                    launcher.prepare(*given)

    def _split_launches(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        at: Geometry,
        values: Values,
        out: Tensor,
        lse: Tensor | None,
        rows: int,
        division: Division,
        two: bool = False,
    ) -> Iterator[tuple[Any, ...]]:
        """The launchers of a call, each with its arguments. `two`: parts are merged by a launch of their own."""
        k, v, score_scale, value_scale = self._scaled(k, v, values)
        tiles, splits, shares, filled, least = division
        launch, merge = self._split_launchers(tiles, sign_of(score_scale))
        kv_heads = self.problem.num_kv_heads
        max_rows = -(-rows // tiles.block_m) * tiles.block_m
        room = division.stored(at.num_seqs)
        parts = kv_heads * max_rows * room
        part_out = torch.empty(parts, self.shape["DV_PAD"], dtype=torch.float32, device=q.device)
        part_lse = torch.empty(parts, dtype=torch.float32, device=q.device)
        row_blocks = at.num_seqs * kv_heads * (max_rows // tiles.block_m)
        merged = 0 if two else self._merged_parts(division)
        counters = counters_of(q, row_blocks) if merged else None
        limit = (NO_LIMIT if counters is None else merged).bit_length() - 1
        windows = (min(values.window_left, NO_LIMIT), min(values.window_right, NO_LIMIT))
        strides = strides_of_operands(q, k, v, out, self.problem.ragged, self.heads_first)
        lse_strides = strides_of_lse(lse, self.problem.ragged)
        variant = variant_of(q, k, v, out, values.sinks, strides)
        yield (
            launch,
            kv_heads * (max_rows // tiles.block_m) * division.items(at.num_seqs),
            variant,
            q,
            k,
            v,
            out,
            lse,
            part_out,
            part_lse,
            no_counters(q) if counters is None and self._may_merge else counters,
            values.sinks,
            values.k_scale if isinstance(values.k_scale, Tensor) else None,
            values.v_scale if isinstance(values.v_scale, Tensor) else None,
            at.cu_seqlens_q,
            at.cu_seqlens_k,
            at.block_table,
            at.seq_lens,
            score_scale,
            value_scale,
            float(values.softcap),
            at.q_tokens,
            at.kv_tokens,
            at.last_page,
            max_rows,
            splits,
            at.num_seqs,
            shares,
            filled,
            least,
            limit,
            room,
            int(counters is not None),
            *windows,
            *strides,
            *lse_strides,
            at.table_stride,
        )
        if room and counters is None:
            yield (
                merge,
                at.num_seqs * kv_heads * rows,
                variant,
                out,
                lse,
                part_out,
                part_lse,
                values.sinks,
                at.cu_seqlens_q,
                at.cu_seqlens_k,
                at.seq_lens,
                at.q_tokens,
                at.kv_tokens,
                max_rows,
                rows,
                splits,
                at.num_seqs,
                shares,
                filled,
                least,
                limit,
                room,
                *windows,
                *strides[12:],
                *lse_strides,
            )

    def _merged_parts(self, division: Division) -> int:
        """Most parts of a sequence that the launch which makes them merges, too; 0 if another launch does."""
        rows, parts = self._read_at_once(division.tiles)
        if not rows or division.parts > MOST_READS * parts:
            return 0
        if not division.shares:
            return division.parts if division.parts > 1 else 0
        return min(MOST_SPLITS, MOST_READS_OF_FEW * parts)

    def _read_at_once(self, tiles: Tiles) -> tuple[int, int]:
        """Rows, and parts of each, that the program which merges reads at once; (0, 0) where none does."""
        if not self._may_merge or tiles.block_m > MEASURED_ROWS:
            return 0, 0
        problem = self.problem
        one = problem.q_len == ONE and not problem.ragged
        rows = min(tiles.block_m, 1 << (problem.group_size - 1).bit_length()) if one else tiles.block_m
        elements = MERGED_ELEMENTS_OF_HOPPER[self._itemsize] if self._kinds else MERGED_ELEMENTS
        if tiles.ahead and rows <= tiles.num_warps:
            elements = MERGED_ELEMENTS_OF_FEW
        return rows, max(1, tiles.num_warps * elements // (rows * self.shape["DV_PAD"]))

    def _split_tiles(self, rows: int) -> Tiles:
        tiles = self._tiles.get(rows)
        if tiles is None:
            tiles = self._tiles[rows] = split_tiles(self.problem, rows)
        return tiles

    def _split_launchers(self, tiles: Tiles, sign: int) -> tuple[Launcher, Launcher]:
        made = self._launchers.get((tiles, sign))
        if made is None:
            shape = {**self.shape, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "CHUNK": chunk_of(tiles)}
            shape |= {"BALANCED": self._balances, "AHEAD": tiles.ahead, "FULL": max(FEW_FULL, tiles.block_n)}
            rows, parts = self._read_at_once(tiles)
            of_split = {**shape, **self.scores, "ROWS": rows, "PARTS": parts, "SIGN": sign}
            made = (
                Launcher(split_kernel, of_split, tiles.num_warps, tiles.num_stages),
                Launcher(merge_kernel, {**shape, "PARTS": PARTS}, num_warps=4),
            )
            self._launchers[tiles, sign] = made
        return made

    def divide(self, num_seqs: int, rows: int, kv_bound: int) -> Division:
        """Tiles, and parts per sequence that keep every multiprocessor at work, where keys suffice for that."""
        tiles = self._split_tiles(rows)
        blocks = -(-rows // tiles.block_m)
        programs = max(1, num_seqs * self.problem.num_kv_heads * blocks)
        if self._few and programs <= FEW_PROGRAMS and rows <= self._few.num_warps:
            return self._divide_few(self._few, num_seqs, kv_bound)
        most = max(1, min(MOST_SPLITS, -(-kv_bound // CHUNK)))
        num_sms, at_once = self.problem.device.num_sms, 2
        shares = self._balances and blocks == 1 and num_seqs > 1 and kv_bound > UNEQUAL
        if not self._kinds or tiles.block_m > MEASURED_ROWS:
            division = Division(tiles, full_waves(programs, at_once * num_sms, most))
            kind = Kind(tiles, at_once, ASSUMED_KIB, 1.0)
        else:
            # Keys count as whole chunks, so that a cache that grows asks anew once in a chunk.
            division = cheapest(programs, num_sms, self._kinds, most * CHUNK, self._row_bytes, most, shares)
            kind = next(kind for kind in self._kinds if kind.tiles == division.tiles)
        if not shares:
            return division
        elements = self._row_bytes // self._itemsize
        least = fewest_keys(programs, division.parts, num_sms, kind, elements, self._itemsize)
        return shared(division, num_seqs, kind.programs, kind.programs * num_sms // self.problem.num_kv_heads, least)

    def _divide_few(self, tiles: Tiles, num_seqs: int, kv_bound: int) -> Division:
        """Parts of few keys for a batch of few programs, all at work at once."""
        places = max(1, self.problem.device.num_sms // self.problem.num_kv_heads)  # of programs of a KV head
        room = FEW_AT_ONCE * places
        parts = max(1, min(FEW_PARTS, -(-kv_bound // chunk_of(tiles)), room // num_seqs))
        if not self._balances or num_seqs == 1 or kv_bound <= UNEQUAL:
            return Division(tiles, parts, filled=max(1, places // num_seqs))
        return Division(tiles, parts, max(1, room - num_seqs))

    def split_bytes(self, num_seqs: int, rows: int, division: Division) -> int:
        """Memory of the parts."""
        block_m = division.tiles.block_m
        parts = self.problem.num_kv_heads * -(-rows // block_m) * block_m * division.stored(num_seqs)
        return parts * (self.shape["DV_PAD"] + 1) * 4

    def _scaled(self, k: Tensor, v: Tensor, values: Values) -> tuple[Tensor, Tensor, float, float]:
        """k and v as the kernels load them, and the factors of scores and results that are on the host."""
        score_scale = float(values.scale) if self.problem.softcap else values.scale * _LOG2E
        if not self.fp8:
            return k, v, score_scale, 1.0
        k_scale = v_scale = 1.0 if self.scores["NATIVE_FP8"] else 256.0  # e4m3_scaled
        if isinstance(values.k_scale, float | int) and isinstance(values.v_scale, float | int):
            k_scale, v_scale = k_scale * values.k_scale, v_scale * values.v_scale
        return k.view(torch.uint8), v.view(torch.uint8), score_scale * k_scale, v_scale


class Prefill(TritonAttention):
    """Every sequence in one pass, a tile of query rows per program."""

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, at: Geometry, values: Values, out: Tensor, lse: Tensor | None
    ) -> None:
        self.prefill(q, k, v, at, values, out, lse, min_rows=0)


class SplitKV(TritonAttention):
    """Few queries per sequence; keys split so that every multiprocessor has work."""

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, at: Geometry, values: Values, out: Tensor, lse: Tensor | None
    ) -> None:
        rows = at.q_bound * self.problem.group_size
        self.split(q, k, v, at, values, out, lse, rows, self.divide(at.num_seqs, rows, seen_by(at, values)))

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        rows = -(-num_tokens // max(1, num_seqs)) * self.problem.group_size
        return self.split_bytes(num_seqs, rows, self.divide(num_seqs, rows, max_kv_len))


class SplitKVFixed(SplitKV):
    """The same with splits that depend on a sequence's own length only; so its result is bitwise batch-invariant.

    Parts are always merged by the second kernel, in graphs and beside them, since the sums of the two have other bits.
    """

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        self._balances = False
        self._few = None  # it launches no such tiles

    def _merged_parts(self, division: Division) -> int:
        return 0

    def divide(self, num_seqs: int, rows: int, kv_bound: int) -> Division:
        return Division(self._split_tiles(rows), max(1, min(FIXED_SPLITS, -(-kv_bound // CHUNK))))


class Mixed(TritonAttention):
    """Ragged batches: sequences of one tile of rows by split KV, the rest by prefill, separated on the device."""

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        self.decode_rows = min(64, power_of_two(problem.group_size))

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, at: Geometry, values: Values, out: Tensor, lse: Tensor | None
    ) -> None:
        division = self.divide(at.num_seqs, self.decode_rows, seen_by(at, values))
        self.split(q, k, v, at, values, out, lse, self.decode_rows, division)
        self.prefill(q, k, v, at, values, out, lse, min_rows=self.decode_rows)

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        return self.split_bytes(num_seqs, self.decode_rows, self.divide(num_seqs, self.decode_rows, max_kv_len))


def chunk_of(tiles: Tiles) -> int:
    """Fewest keys that are worth a program of their own."""
    return tiles.block_n if tiles.ahead else CHUNK


def sign_of(scale: float) -> int:
    """-1, 0 or 1."""
    return (scale > 0) - (scale < 0)


def seen_by(at: Geometry, values: Values) -> int:
    """Upper bound on the keys that the queries of a sequence, which are its last tokens, see together."""
    return at.kv_bound if values.window_left < 0 else min(at.kv_bound, values.window_left + at.q_bound)
