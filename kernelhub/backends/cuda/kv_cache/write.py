"""From a call of `write_kv_cache` to its CUDA launch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.backends.cuda import library
from kernelhub.backends.cuda.shapes import BITS, C_TYPES, VECTOR_BYTES, block_of, blocks_for, in_vectors, times_of
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.ops.attention.problem import FP8, QUANTISED
from kernelhub.ops.kv_cache.adapter import KvCacheAdapter, Scale
from kernelhub.ops.kv_cache.problem import STYLES, KvCacheProblem
from kernelhub.ops.kv_cache.rope import Rope

_SCALES = {None: 0, "value": 1, "tensor": 2, "head": 3}
_PACKING, _ROPE_PACKING = "7P" + "17q" + "2f", "10P" + "27q" + "2f"
_BLOCK = 256
_FEW_BLOCK = 64
_TIMES = {1: "vectors", 2: "twice"}  # vectors that a thread moves
_TURNS = {1: "few", 4: "vectors"}  # heads that a thread turns at once


class Spread(NamedTuple):
    """How threads share tokens that are turned.

    Attributes:
        lanes: threads of a block for a token.
        parts: blocks for a token.
        tokens: of a block.
        heads: that a thread turns at once.
    """

    lanes: int
    parts: int
    tokens: int
    heads: int


def spread(across: int, heads: int, tokens: int, num_sms: int) -> Spread:
    """For heads of so many columns of pairs, of which a thread turns four; one where that would leave GPUs idle.

    On an H200 64 heads of q and 8 of keys take, by four and by one, 4.1 and 4.1 us with 128 tokens, 8.1 and 10.1 with
    512 (benchmarks/results/small_ops_h200.json).
    """
    at_once = max(_TURNS)
    if tokens * blocks_for(heads, at_once) * across < _BLOCK * num_sms:
        at_once = 1
    groups, of_block = blocks_for(heads, at_once), _BLOCK // across
    parts = blocks_for(groups, of_block)
    lanes = across * blocks_for(groups, parts)
    most = _BLOCK if at_once > 1 else _FEW_BLOCK
    return Spread(lanes, parts, max(1, min(most // lanes, tokens // num_sms)), at_once)


class Write(KvCacheAdapter):
    """A thread for a vector of a key or a value; with a rotary embedding for two vectors of several heads."""

    def __init__(self, problem: KvCacheProblem) -> None:
        super().__init__(problem)
        self._repeated = Repeated()
        size = getattr(torch, problem.dtype).itemsize
        quantises = problem.kv_dtype in QUANTISED
        heads, widths = problem.num_kv_heads, (problem.head_dim_qk, problem.head_dim_vo)
        made = library.library(
            "write_kv_cache.cu",
            {
                "ELEMENT": C_TYPES[problem.dtype] if quantises or problem.rope else BITS[size],
                "SIZE": size,
                "FORMAT": (1 if problem.kv_dtype == FP8 else 2) if quantises else 0,
                "SCALE": _SCALES[problem.kv_scale],
                "PAGE": problem.page_size,
                "HEADS": heads,
                "K_WIDTH": widths[0],
                "V_WIDTH": widths[1],
                "ROPE": 0 if problem.rope is None else 1 + STYLES.index(problem.rope),
                "ROTARY": problem.rotary_dim,
            },
            problem.device,
        )
        self._each = VECTOR_BYTES // size
        packing = _PACKING if problem.rope is None else _ROPE_PACKING
        self._elements = made.kernel("write_elements", packing)
        whole = all(width % self._each == 0 for width in widths)
        if problem.rope is not None:
            whole = whole and problem.rotary_dim % (2 * self._each) == 0
        names = _TIMES if problem.rope is None else _TURNS
        self._kernels = {n: made.kernel(f"write_{name}", packing) for n, name in names.items()} if whole else {}
        self._per_token = heads * sum(widths)
        self._turned = problem.rotary_dim // 2  # of a head: a thread has two columns for each pair

    def launch(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Scale,
        v_scale: Scale,
        rope: Rope | None = None,
    ) -> None:
        given = (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, rope)
        self._repeated.run(*_identified(*given), self._launch_anew, *given)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(*_identified(*given))

    def _launch_anew(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Scale,
        v_scale: Scale,
        rope: Rope | None,
    ) -> None:
        each, kernel = 1, self._elements
        if self._kernels and all(in_vectors(part, self._each) for part in (k, v, k_cache, v_cache)):
            each = self._each
        tokens, num_sms = k.shape[0], max(1, self.problem.device.num_sms)
        more: tuple[Tensor | int, ...] = ()
        sizes: tuple[int, ...] = ()
        if rope is not None:
            positions, cos_sin_cache, q = rope
            if each > 1 and not (in_vectors(cos_sin_cache, 4) and (q is None or in_vectors(q, each))):
                each = 1
            q_heads, strides = (0, (0, 0, 0)) if q is None else (q.shape[1], q.stride())
            more = (0 if q is None else q, positions, cos_sin_cache)
            across = min(self._turned // each, _BLOCK)
            heads = q_heads + self.problem.num_kv_heads
            lanes, parts, of_block, at_once = spread(across, heads, tokens, num_sms)
            if each > 1:
                kernel = self._kernels[at_once]
            sizes = (lanes, parts, q_heads, len(cos_sin_cache), *strides, positions.stride(0), *cos_sin_cache.stride())
            blocks, threads = blocks_for(tokens, of_block) * parts, of_block * lanes
        else:
            vectors, times = tokens * self._per_token // each, 1
            threads = block_of(vectors, num_sms)
            if each > 1:
                times = times_of(vectors, num_sms)
                kernel = self._kernels[times]
            blocks = blocks_for(vectors, times * threads)
        kernel(
            k.get_device(),
            blocks,
            threads,
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping,
            k_scale if isinstance(k_scale, Tensor) else 0,
            v_scale if isinstance(v_scale, Tensor) else 0,
            *more,
            tokens,
            k_cache.shape[0] * self.problem.page_size,
            *k.stride(),
            *v.stride(),
            *k_cache.stride(),
            *v_cache.stride(),
            slot_mapping.stride(0),
            *sizes,
            k_scale if isinstance(k_scale, float | int) else 1.0,
            v_scale if isinstance(v_scale, float | int) else 1.0,
        )


def _identified(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Scale,
    v_scale: Scale,
    rope: Rope | None = None,
) -> tuple[Hashable, list[Tensor]]:
    """The key and the tensors of a call that may be repeated."""
    scales = [scale for scale in (k_scale, v_scale) if isinstance(scale, Tensor)]
    on_host = [None if isinstance(scale, Tensor) else scale for scale in (k_scale, v_scale)]
    turned = [] if rope is None else [part for part in rope if part is not None]
    return (k.shape[0], *on_host), [k, v, k_cache, v_cache, slot_mapping, *scales, *turned]
