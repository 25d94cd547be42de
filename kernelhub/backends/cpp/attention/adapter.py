"""From calls of `attention`, `paged_attention` and `mla_attention` to the C++ function."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.cpp.build import BuildError, library
from kernelhub.ops.attention.adapter import AttentionAdapter, DenseStep, PagedStep
from kernelhub.ops.attention.arguments import Scale, Values
from kernelhub.ops.attention.problem import AttentionProblem, PagedAttentionProblem
from kernelhub.ops.mla.attention.adapter import MlaAdapter, MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.ops.operands import check_eager

SOURCE = "attention.cpp"
KINDS = {"bfloat16": 0, "float16": 1, "float32": 2, "float8_e4m3fn": 3, "float8_e5m2": 4}  # as in numbers.h
_SIZES = ctypes.c_int64 * 44
_NUMBERS = ctypes.c_double * 2

Strides = tuple[int, ...]


VECTORS, AMX, DOTS = range(3)  # `Products` of attention_call.h
_MISSING = {
    AMX: "by AMX here: the compiler lacks them (g++ 11 and clang 12 have them), or Linux does not give this process "
    "AMX's registers (5.16 and later can)",
    DOTS: "by AVX-512 BF16 here: the compiler lacks them (g++ 10 and clang 9 have them)",
}


def _function(products: int, problem: AttentionProblem | MlaProblem) -> Any:
    compiled = library(SOURCE)
    if products:
        has = compiled.kernelhub_attention_has
        has.argtypes, has.restype = [ctypes.c_int64] * 3, ctypes.c_int64
        if not has(products, KINDS[problem.q_dtype], KINDS[problem.kv_dtype]):
            raise BuildError(f"{SOURCE} has no products {_MISSING[products]}")
    run = compiled.kernelhub_attention
    run.argtypes = [ctypes.c_void_p] * 15 + [ctypes.c_int64]
    run.restype = None
    return run


class SplitKV(AttentionAdapter[AttentionProblem, DenseStep]):
    """`attention` on a CPU. Made, it compiles the source, or finds it compiled.

    Attributes:
        products: what multiplies. Where the compiler lacks it, or Linux keeps AMX's registers, it cannot be made.
    """

    products = VECTORS

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        self._run = _function(self.products, problem)

    def launch(
        self, q: Tensor, k: Tensor, v: Tensor, step: DenseStep, values: Values, out: Tensor, lse: Tensor | None
    ) -> None:
        check_eager("attention")
        ragged = step.cu_seqlens_q is not None
        counts = (step.num_seqs, 0, q.shape[0], 0, k.shape[0]) if ragged else (*q.shape[:2], 0, k.shape[1], 0)
        _attend(
            self._run,
            self.products,
            self.problem,
            (q, k, v),
            (None, None, step.cu_seqlens_q, step.cu_seqlens_k, None),
            values,
            counts,
            (0, 0, 0, 0),
            (_of_rows(q), _of_rows(out), _of_lse(lse)),
            (_of_keys(k), _of_keys(v)),
            (out, lse),
        )


class SplitKVPaged(AttentionAdapter[PagedAttentionProblem, PagedStep]):
    """`paged_attention` on a CPU. Made, it compiles the source, or finds it compiled."""

    products = VECTORS

    def __init__(self, problem: PagedAttentionProblem) -> None:
        super().__init__(problem)
        self._run = _function(self.products, problem)

    def launch(
        self, q: Tensor, k: Tensor, v: Tensor, step: PagedStep, values: Values, out: Tensor, lse: Tensor | None
    ) -> None:
        check_eager("paged_attention")
        by_token = self.problem.kv_layout == "NHD"
        _attend(
            self._run,
            self.products,
            self.problem,
            (q, k, v),
            (step.block_table, step.seq_lens, step.cu_seqlens_q, None, None),
            values,
            *_of_pages(q, step, self.problem.page_size, k.shape[0]),
            _of_step(q, step, out, lse),
            (_of_cache(k, by_token), _of_cache(v, by_token)),
            (out, lse),
        )


class SplitKVLatent(MlaAdapter):
    """`mla_attention` on a CPU: a row of the cache is the key of all heads, its beginning their value."""

    products = VECTORS

    def __init__(self, problem: MlaProblem) -> None:
        super().__init__(problem)
        self._run = _function(self.products, problem)

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
        check_eager("mla_attention")
        pages = kv_cache.unsqueeze(2)
        strides = _of_cache(pages, True)
        right = 0 if self.problem.causal else -1
        scale = values.kv_scale
        _attend(
            self._run,
            self.products,
            self.problem,
            (q, pages, pages),
            (step.block_table, step.seq_lens, step.cu_seqlens_q, None, topk_indices),
            Values(values.scale, -1, right, 0.0, values.sinks, scale, scale),
            *_of_pages(q, step, self.problem.page_size, pages.shape[0]),
            _of_step(q, step, out, lse),
            (strides, strides),
            (out, lse),
        )


class Amx(SplitKV):
    """`attention` by AMX."""

    products = AMX


class AmxPaged(SplitKVPaged):
    """`paged_attention` by AMX."""

    products = AMX


class AmxLatent(SplitKVLatent):
    """`mla_attention` by AMX."""

    products = AMX


class Dots(SplitKV):
    """`attention` by AVX-512 BF16."""

    products = DOTS


class DotsPaged(SplitKVPaged):
    """`paged_attention` by AVX-512 BF16."""

    products = DOTS


class DotsLatent(SplitKVLatent):
    """`mla_attention` by AVX-512 BF16."""

    products = DOTS


def _attend(
    run: Any,
    products: int,
    problem: AttentionProblem | MlaProblem,
    operands: tuple[Tensor, Tensor, Tensor],
    metadata: tuple[Tensor | None, ...],
    values: Values,
    counts: tuple[int, ...],
    pages: tuple[int, ...],
    rows: tuple[Strides, Strides, Strides],
    keys: tuple[tuple[int, ...], tuple[int, ...]],
    results: tuple[Tensor, Tensor | None],
) -> None:
    q, k, v = operands
    out, lse = results
    listed = metadata[-1]
    sinks = None if values.sinks is None else values.sinks.float()
    k_scale, of_k, k_step = _scale(values.k_scale)
    v_scale, of_v, v_step = _scale(values.v_scale)
    numbers = _NUMBERS(values.scale, values.softcap)  # a name of its own: other threads run while the call reads it
    sizes = _SIZES(
        *counts,
        q.shape[-2],
        k.shape[-2] if isinstance(problem, MlaProblem) else problem.num_kv_heads,
        q.shape[-1],
        out.shape[-1],
        *pages,
        values.window_left,
        values.window_right,
        KINDS[problem.q_dtype],
        KINDS[problem.kv_dtype],
        k_step,
        v_step,
        *rows[0],
        *rows[1],
        *rows[2],
        *keys[0],
        *keys[1],
        *((-1, 0, 0) if listed is None else (listed.shape[1], *listed.stride())),
        products,
    )
    run(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        *(None if tensor is None else tensor.data_ptr() for tensor in metadata),
        None if sinks is None else sinks.data_ptr(),
        of_k,
        of_v,
        out.data_ptr(),
        None if lse is None else lse.data_ptr(),
        ctypes.addressof(numbers),
        ctypes.addressof(sizes),
        torch.get_num_threads(),
    )
    del k_scale, v_scale  # whose memory was read


def _scale(scale: Scale) -> tuple[Any, int | None, int]:
    """What holds a scale, its address and its stride between heads."""
    if scale is None:
        return None, None, 0
    if isinstance(scale, Tensor):
        held = scale.float()
        return held, held.data_ptr(), held.stride(0) if held.numel() > 1 else 0
    number = ctypes.c_float(scale)
    return number, ctypes.addressof(number), 0


def _of_rows(rows: Tensor) -> Strides:
    """Strides of batched [B, S, H, D] or ragged [T, H, D] rows: batch, token, head, element."""
    strides = rows.stride()
    return (0, *strides) if rows.ndim == 3 else strides


def _of_lse(lse: Tensor | None) -> Strides:
    """Strides of [B, H, S] or [H, T]: batch, token, head."""
    if lse is None:
        return 0, 0, 0
    *batch, head, token = lse.stride()
    return (batch[0] if batch else 0, token, head)


def _of_keys(keys: Tensor) -> tuple[int, ...]:
    """Strides in bytes of batched [B, L, KH, D] or ragged [T, KH, D] keys: batch, page, token, head, element."""
    *batch, token, head, element = (stride * keys.itemsize for stride in keys.stride())
    return (batch[0] if batch else 0, 0, token, head, element)


def _of_cache(cache: Tensor, by_token: bool) -> tuple[int, ...]:
    page, one, other, element = (stride * cache.itemsize for stride in cache.stride())
    return (0, page, *((one, other) if by_token else (other, one)), element)


def _of_pages(
    q: Tensor, step: PagedStep, page_size: int, num_pages: int
) -> tuple[tuple[int, ...], tuple[int, int, int, int]]:
    tokens = q.shape[1] if q.ndim == 4 else 1
    counts = (step.num_seqs, tokens, q.shape[0], 0, 0)
    return counts, (page_size, num_pages, step.max_pages, step.block_table.stride(0))


def _of_step(q: Tensor, step: PagedStep, out: Tensor, lse: Tensor | None) -> tuple[Strides, Strides, Strides]:
    """Strides of rows; those of one query each are a batch of single tokens."""
    if q.ndim == 4 or step.cu_seqlens_q is not None:
        return _of_rows(q), _of_rows(out), _of_lse(lse)
    of_q, of_out = q.stride(), out.stride()
    head, batch = (0, 0) if lse is None else lse.stride()
    return (of_q[0], 0, *of_q[1:]), (of_out[0], 0, *of_out[1:]), (batch, 0, head)
