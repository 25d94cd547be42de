"""From a call of `paged_attention` to its CUDA launches."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kernelhub.backends.cuda import library
from kernelhub.backends.cuda.shapes import C_TYPES, KINDS_OF_SINKS
from kernelhub.backends.shared.decode_parts import parts_alike
from kernelhub.backends.shared.operands import adjacent, aligned, contiguous_copy, most_tokens, on_device_of
from kernelhub.backends.shared.repeated_attention import RepeatedAttention
from kernelhub.backends.shared.strides import strides_of_lse, strides_of_tokens
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import E5M2, FEW, FEW_TOKENS, FP8, QUANTISED, PagedAttentionProblem
from kernelhub.runtime.counters import counters_of

_SOURCE = "sm_90/paged_decode.cu"
_PACKING = "12P3f7i16q"
_OFFSETS = "Pq"  # if ragged, after that
_LOG2E = math.log2(math.e)
_WARPS = 4
_THREADS = 32 * _WARPS
_RING_BYTES = 24 << 10  # of a warp, with two blocks on a multiprocessor
_NO_LIMIT = 1 << 30  # a wider window sees everything; sums of positions stay within 32 bits
_MANY_SEQS = 16  # from which on sequences are cut alike
_MOST_ROWS = 1024  # that have four warps each to merge them
# Sequences of one query from which on one launch makes parts and merges them. With 256 it saves 4 to 10 us of 35
# to 145, with 64 the two differ by up to 2 %, with 1 to 16 it takes 0.1 to 1.8 us more. Of 128 only those with 64 idle
# ones were timed, where the two are level (benchmarks/results/cuda_paged_steps_h200.json).
_SEQS_IN_ONE_LAUNCH = 128
# One sequence of one query has four blocks for three multiprocessors, not two for each: 1 x 4096 in bfloat16 then takes
# 0.92 of the time, 256 to 16384 keys of 8 heads 0.97 to 1.01, 32768 to 131072 1.02 to 1.11
# (cuda_paged_steps_h200.json, "few" and "few_early").
_KEYS_OF_FEW_BLOCKS = 16384 * 8


class Tiles(NamedTuple):
    """What a block holds.

    Attributes:
        rows: query rows.
        keys: that a warp takes at a time.
        stages: of the ring of a warp.
        blocks: on a multiprocessor.
    """

    rows: int
    keys: int
    stages: int
    blocks: int

    def constants(self, head_dim: int, itemsize: int) -> dict[str, int]:
        """As the source names them, with the bytes of shared memory that they take."""
        ring = _WARPS * self.stages * 2 * self.keys * head_dim * itemsize
        sums = max(2 * self.rows * head_dim, self.rows * (head_dim + 4)) * 4
        named = {"ROWS": self.rows, "KEYS": self.keys, "STAGES": self.stages, "BLOCKS": self.blocks}
        return named | {"SHARED_BYTES": ring + sums + 2 * _WARPS * self.rows * 4}


def tiles_of(head_dim: int, itemsize: int, rows: int) -> Tiles:
    """Steps of 8 KB in a ring of three, smaller ones of few columns; the widest rows leave room for one block."""
    row_bytes = head_dim * itemsize
    keys = 32 if row_bytes <= 128 else 16
    step = 2 * keys * row_bytes
    held = 8 if rows <= 8 or head_dim > 128 else 16
    return Tiles(held, keys, 3, 1) if 3 * step > _RING_BYTES else Tiles(held, keys, _RING_BYTES // step, 2)


def parts_of(num_seqs: int, blocks: int, inner: int, alike: bool = True) -> int:
    """Parts of all keys, for so many blocks at once, of which each part has `inner`.

    A part that begins within a sequence writes float32 sums, which are merged.
    """
    most = max(1, blocks // inner)
    if num_seqs < _MANY_SEQS or not alike:
        return most
    return parts_alike(most, num_seqs)


def blocks_for_one(num_sms: int, most: int, keys: int) -> int:
    """Blocks at once for one sequence of one query, of `most`; `keys`: at most so many, each head's counted."""
    return min(most, num_sms * 4 // 3) if keys <= _KEYS_OF_FEW_BLOCKS else most


class Kernels(NamedTuple):
    """Of a source compiled for some tiles.

    Attributes:
        decode: makes the parts of all sequences.
        merge: merges them.
        merging: makes and merges them, in one launch, where there are counters for it.
    """

    decode: Any
    merge: Any
    merging: Any


class Decode(RepeatedAttention):
    """Parts of equal work for as many blocks as the device runs at once.

    A second launch merges them, or the last block of each sequence, by counters.

    The device reads where the queries of ragged sequences are. A bound on them is what they are cut into tiles by, so a
    larger one than needed costs time, but every number of queries is served.
    """

    problem: PagedAttentionProblem
    constants: ClassVar[dict[str, int]] = {}  # what differs from the form that is chosen
    tiles: ClassVar[Tiles | None] = None
    alike: ClassVar[bool] = True  # whether sequences may be cut alike
    merges: ClassVar[bool | None] = None  # whether the last block of a sequence merges, if not as `_merges` says

    def __init__(self, problem: PagedAttentionProblem) -> None:
        super().__init__(problem)
        self._quantised = problem.kv_dtype in QUANTISED
        self._itemsize = 1 if self._quantised else 2
        self._heads_first = problem.kv_layout == "HND"
        self._kernels: dict[int, Kernels] = {}
        for tokens in (2, FEW_TOKENS) if problem.q_len == FEW else (1,):
            self._kernels_of(self._tiles_of(tokens))

    def _tiles_of(self, tokens: int) -> Tiles:
        """Those compiled with the plan: one for few tokens may be run with one, a ragged one for one with more."""
        rows = (max(tokens, 2) if self.problem.q_len == FEW else 1) * self.problem.group_size
        return self.tiles or tiles_of(self.problem.head_dim_qk, self._itemsize, rows)

    def _merges(self, num_seqs: int, tokens: int) -> bool:
        """Whether one launch makes and merges parts, where there are counters for it."""
        if self.merges is not None:
            return self.merges
        return tokens == 1 and num_seqs >= _SEQS_IN_ONE_LAUNCH

    def _kernels_of(self, tiles: Tiles) -> Kernels:
        made = self._kernels.get(tiles.rows)
        if made is None:
            problem = self.problem
            constants: dict[str, int | str] = {
                "ELEMENT": C_TYPES[problem.q_dtype],
                "FORMAT": {FP8: 1, E5M2: 2}.get(problem.kv_dtype, 0),
                "D": problem.head_dim_qk,
                "GROUP": problem.group_size,
                "KV_HEADS": problem.num_kv_heads,
                "PAGE": problem.page_size,
                "SCALES": {"tensor": 1, "head": 2}.get(problem.kv_scale or "", 0),
                "FEW": int(problem.q_len == FEW or problem.ragged),
                "RAGGED": int(problem.ragged),
                "CAUSAL": int(problem.causal),
                "HAS_WINDOW": int(problem.window_left),
                "HAS_SOFTCAP": int(problem.softcap),
                "HAS_SINKS": int(problem.sinks),
                "HAS_LSE": int(problem.lse),
                **tiles.constants(problem.head_dim_qk, self._itemsize),
                **self.constants,
            }
            shared = int(constants["SHARED_BYTES"])
            source = library.library(_SOURCE, constants, problem.device, specific=True)
            packing = _PACKING + _OFFSETS if problem.ragged else _PACKING
            made = self._kernels[tiles.rows] = Kernels(
                source.kernel("paged_decode", packing, shared_bytes=shared, may_be_graph=True),
                source.kernel("paged_merge", packing + "2i", may_be_graph=True),
                source.kernel("paged_decode_merging", packing + "P", shared_bytes=shared, may_be_graph=True),
            )
        return made

    def _launch_anew(
        self, q: Tensor, k: Tensor, v: Tensor, step: Any, values: Values, out: Tensor, lse: Tensor | None
    ) -> None:
        problem, heads, width = self.problem, self.problem.num_kv_heads, self.problem.head_dim_qk
        ragged = problem.ragged
        tokens = most_tokens(step.max_seqlen_q, q.shape[0]) if ragged else q.shape[1] if q.ndim == 4 else 1
        rows = tokens * problem.group_size
        room = min(step.max_pages * problem.page_size, _NO_LIMIT) if k.shape[0] else 0  # there is no page to be read
        if not k.shape[0]:  # but there has to be an address
            k, v = k.new_zeros(1, *k.shape[1:]), v.new_zeros(1, *v.shape[1:])
        q, k, v = aligned(q), aligned(k), aligned(v)
        in_vectors = out.stride(-1) == 1 and not (out.data_ptr() & 7 or any(s % 4 for s in out.stride()[:-1]))
        result = out
        if not in_vectors:  # rows of no sequence stay as they are
            result = contiguous_copy(out) if ragged else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        lengths, table = adjacent(step.seq_lens), adjacent(step.block_table)
        tiles = self._tiles_of(tokens)
        kernels = self._kernels_of(tiles)
        each_kv_head = -(-rows // tiles.rows)  # tiles of a sequence
        inner = heads if ragged else heads * each_kv_head
        blocks = tiles.blocks * problem.device.num_sms
        if step.num_seqs * tokens == 1:
            blocks = blocks_for_one(problem.device.num_sms, blocks, room * heads)
        parts = parts_of(step.num_seqs, blocks, inner, self.alike)
        slots = 2 * parts * inner * tiles.rows
        part_out = torch.empty(slots, width, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(slots, dtype=torch.float32, device=q.device)
        scale = float(values.scale) * (1.0 if problem.softcap else _LOG2E)
        value_scale = 1.0
        scales: list[Tensor | int] = [0, 0]
        if isinstance(values.k_scale, Tensor) and isinstance(values.v_scale, Tensor):
            scales = [values.k_scale, values.v_scale]
        elif self._quantised:
            assert values.k_scale is not None
            assert values.v_scale is not None
            scale, value_scale = scale * float(values.k_scale), float(values.v_scale)
        walked = step.num_seqs * each_kv_head if ragged else step.num_seqs
        counters = counters_of(q, walked * inner) if self._merges(step.num_seqs, tokens) else None
        merged_rows = (q.shape[0] if ragged else step.num_seqs * tokens) * problem.num_q_heads
        each_row = 4 if merged_rows <= _MOST_ROWS else 1  # warps
        parameters = (
            q,
            k,
            v,
            result,
            0 if lse is None else lse,
            part_out,
            part_lse,
            0 if values.sinks is None else values.sinks,
            *scales,
            table,
            lengths,
            scale,
            value_scale,
            float(values.softcap),
            step.num_seqs,
            tokens,
            each_kv_head,
            room,
            k.shape[0] - 1,
            min(values.window_left, _NO_LIMIT),
            0 if values.sinks is None else KINDS_OF_SINKS[values.sinks.dtype],
            table.stride(0),
            *self._strides_of_tokens(q),
            *self._strides_of(k),
            *self._strides_of(v),
            *self._strides_of_tokens(result),
            *self._strides_of_lse(lse),
            *((adjacent(step.cu_seqlens_q), q.shape[0]) if ragged else ()),
        )
        with on_device_of(q):
            device = q.get_device()
            if counters is not None:
                kernels.merging(device, parts * inner, _THREADS, *parameters, counters)
            else:
                kernels.decode(device, parts * inner, _THREADS, *parameters)
                kernels.merge(device, -(-merged_rows * each_row // _WARPS), _THREADS, *parameters, parts, each_row)
            if result is not out:
                out.copy_(result)

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        problem = self.problem
        tokens = FEW_TOKENS if problem.ragged else -(-num_tokens // max(1, num_seqs))
        rows, tiles = tokens * problem.group_size, self._tiles_of(tokens)
        inner = problem.num_kv_heads if problem.ragged else problem.num_kv_heads * -(-rows // tiles.rows)
        blocks = max(inner, tiles.blocks * problem.device.num_sms)
        return 2 * blocks * tiles.rows * (problem.head_dim_vo + 1) * 4

    def _strides_of_tokens(self, tensor: Tensor) -> tuple[int, int, int]:
        """(sequence, token, head) strides of q or out, as the source takes them."""
        sequence, token, head = strides_of_tokens(tensor, self.problem.ragged)
        return (token if self.problem.ragged else sequence), token, head

    def _strides_of_lse(self, lse: Tensor | None) -> tuple[int, int, int]:
        """(sequence, head, token) strides of the LSE, as the source takes them."""
        sequence, head, token = strides_of_lse(lse, self.problem.ragged)
        return (token if self.problem.ragged else sequence), head, token

    def _strides_of(self, cache: Tensor) -> tuple[int, int, int]:
        """(page, token, head) strides in bytes."""
        page, first, second, _ = (stride * cache.element_size() for stride in cache.stride())
        return (page, second, first) if self._heads_first else (page, first, second)
