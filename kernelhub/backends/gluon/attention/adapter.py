"""From a call of `attention` or `paged_attention` to its Gluon launch."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kernelhub.backends.gluon.launch import Launcher, descriptor
from kernelhub.backends.shared.operands import adjacent, contiguous_copy, on_device_of
from kernelhub.backends.shared.repeated_attention import RepeatedAttention
from kernelhub.backends.shared.strides import strides_of_lse, strides_of_tokens
from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import AttentionProblem, PagedAttentionProblem

_LOG2E = math.log2(math.e)
_ROWS = 128  # of a tile
# Columns of keys in a first product, where they come in two: blocks have powers of two.
_FIRST_OF = {96: 64, 192: 128}
_NO_LIMIT = 1 << 30  # a wider window sees everything; sums of positions stay within 32 bits


class Rows(NamedTuple):
    """An operand as rows and columns, and how far apart its parts are in them.

    Attributes:
        rows: [rows, columns], a view.
        outer: rows between two sequences, or two pages.
        head_row: rows between two heads.
        head_column: columns between two heads.
    """

    rows: Tensor
    outer: int
    head_row: int
    head_column: int


class Prefill(RepeatedAttention):
    """Tiles of 128 queries of a head, taken in turns by as many programs as the device runs at once.

    Attributes:
        kernel: what it launches.
    """

    kernel: ClassVar[Any]

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        self._page = problem.page_size if isinstance(problem, PagedAttentionProblem) else 0
        self._heads_first = isinstance(problem, PagedAttentionProblem) and problem.kv_layout == "HND"
        self._d0 = _FIRST_OF.get(problem.head_dim_qk, problem.head_dim_qk)
        self._d1 = problem.head_dim_qk - self._d0
        self._dv = 128 if problem.head_dim_vo == 96 else problem.head_dim_vo
        self._block_n = 64 if problem.head_dim_vo > 128 else 128
        self._static: dict[str, Any] = {
            "HEADS": problem.num_q_heads,
            "GROUP": problem.group_size,
            "RAGGED": problem.ragged,
            "PAGE": self._page,
            "D0": self._d0,
            "D1": self._d1,
            "DV": self._dv,
            "WIDTH": problem.head_dim_vo,
            "HAS_LEFT": problem.window_left,
            "HAS_RIGHT": problem.causal or problem.window_right,
            "HAS_SOFTCAP": problem.softcap,
            "HAS_SINKS": problem.sinks,
            "HAS_LSE": problem.lse,
            "BLOCK_N": self._block_n,
            "STAGES": 2,
            "Q_STAGES": 1,
        }
        self._launchers: dict[bool, Launcher] = {}

    def _launch_anew(
        self, q: Tensor, k: Tensor, v: Tensor, step: Any, values: Values, out: Tensor, lse: Tensor | None
    ) -> None:
        problem, ragged, paged = self.problem, self.problem.ragged, bool(self._page)
        if q.ndim == 3 and not ragged:  # one query of each sequence
            q, out = q.unsqueeze(1), out.unsqueeze(1)
        if paged and not k.shape[0]:  # no sequence has a key, but there has to be an address
            k, v = (cache.new_zeros(1, *cache.shape[1:]) for cache in (k, v))
        queries = _rows_of(q, paged=False, heads_first=False)
        keys = _rows_of(k, paged, self._heads_first)
        values_of = _rows_of(v, paged, self._heads_first)
        num_seqs, q_tokens, kv_tokens = self._sizes(q, k, step)
        pack = self._static.get("PACK", 1)
        each = _ROWS // pack  # queries of a tile
        blocks = q_tokens // each + num_seqs if ragged else -(-q_tokens // each) * num_seqs
        total = blocks * (problem.num_q_heads // pack)
        if not total:
            return
        (k_scale, of_keys), (v_scale, of_values) = _parts(values.k_scale), _parts(values.v_scale)
        of_scores = values.scale * of_keys
        positive = of_scores > 0
        launch = self._launchers.get(positive)
        if launch is None:
            launch = self._launchers[positive] = Launcher(self.kernel, {**self._static, "SCALED": not positive})
        softcap = values.softcap
        scale = of_scores / softcap if problem.softcap else of_scores * _LOG2E
        result = out if out.stride(-1) == 1 else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        lse_of = result if lse is None else lse
        sinks = result if values.sinks is None else values.sinks
        nothing = step.seq_lens if paged else result
        table = adjacent(step.block_table) if paged else nothing
        strides = strides_of_tokens(result, ragged)
        page = min(self._page or self._block_n, self._block_n)
        variant = (q.get_device(), result.dtype, sinks.dtype, strides, result.data_ptr() & 15)
        with on_device_of(q):
            launch(
                min(problem.device.num_sms, total),
                variant,
                descriptor(queries.rows, (64 // pack, self._d0)),
                descriptor(queries.rows, (64 // pack, self._d1 or self._d0)),
                descriptor(keys.rows, (page, self._d0)),
                descriptor(keys.rows, (page, self._d1 or self._d0)),
                descriptor(values_of.rows, (page, self._dv)),
                result,
                lse_of,
                sinks,
                *self.scales(k_scale, v_scale, result),
                step.cu_seqlens_q if ragged else nothing,
                step.cu_seqlens_k if ragged and not paged else nothing,
                table,
                step.seq_lens if paged else nothing,
                scale,
                *self.factor_of_values(of_values),
                softcap * _LOG2E,
                num_seqs,
                q_tokens,
                kv_tokens,
                total,
                table.stride(0) if paged else 0,
                keys.outer,
                values_of.outer,
                keys.rows.shape[0],
                values_of.rows.shape[0],
                max(0, k.shape[0] - 1),
                queries.outer,
                queries.head_row,
                queries.head_column,
                keys.outer,
                keys.head_row,
                keys.head_column,
                values_of.outer,
                values_of.head_row,
                values_of.head_column,
                min(values.window_left, _NO_LIMIT),
                min(values.window_right, _NO_LIMIT),
                *strides,
                *strides_of_lse(lse, ragged),
                *self.order(q, num_seqs, q_tokens, kv_tokens),
            )
            if result is not out:
                out.copy_(result)

    def scales(self, k_scale: Tensor | None, v_scale: Tensor | None, nothing: Tensor) -> tuple[Tensor, ...]:
        """Factors of keys and values on the device that the kernel takes."""
        return ()

    def factor_of_values(self, factor: float) -> tuple[float, ...]:
        """What the kernel multiplies results by, if it takes that."""
        return ()

    def order(self, q: Tensor, num_seqs: int, q_tokens: int, kv_tokens: int) -> tuple[Any, ...]:
        """What else the kernel takes to order tiles."""
        return ()

    def _sizes(self, q: Tensor, k: Tensor, step: DenseStep | PagedStep) -> tuple[int, int, int]:
        """(sequences, queries, keys): of a sequence if batched, of all if ragged; keys of a table's row if paged."""
        if isinstance(step, PagedStep):
            tokens = q.shape[1] if q.ndim == 4 else q.shape[0] if self.problem.ragged else 1
            return step.num_seqs, tokens, min(step.max_pages * self._page, _NO_LIMIT)
        if self.problem.ragged:
            return step.num_seqs, q.shape[0], k.shape[0]
        return q.shape[0], q.shape[1], k.shape[1]


def _parts(scale: Any) -> tuple[Tensor | None, float]:
    """Factors of float8 as a tensor, and as a number: one of them is neutral."""
    if isinstance(scale, Tensor):
        return scale, 1.0
    return None, 1.0 if scale is None else float(scale)


def _rows_of(tensor: Tensor, paged: bool, heads_first: bool) -> Rows:
    """q, k, v or a cache as rows and columns; a copy where TMA cannot read it so."""
    made = _view_of(tensor, paged, heads_first)
    if made is None:
        made = _view_of(contiguous_copy(tensor), paged, heads_first)
        assert made is not None, "a contiguous tensor is rows and columns"
    return made


def _view_of(tensor: Tensor, paged: bool, heads_first: bool) -> Rows | None:
    """The same without a copy, or None."""
    if tensor.ndim == 4:
        outer, tokens, heads = tensor.shape[0], tensor.shape[1], tensor.shape[2]
        outer_stride, row, head = tensor.stride()[:3]
        if heads_first:
            tokens, heads, row, head = heads, tokens, head, row
    else:  # ragged: offsets say where sequences are
        outer, (tokens, heads), outer_stride, (row, head) = 1, tensor.shape[:2], 0, tensor.stride()[:2]
    width = tensor.shape[-1]
    if not tokens or not outer:  # there has to be an address, of which nothing is read
        return Rows(tensor.new_zeros(1, heads * width), 0, 0, width)
    # Strides of sizes of 1 say nothing.
    if heads == 1:
        head = width
    if tokens == 1:
        row = max(head * heads, width) if head < max(row, outer_stride, width * heads + 1) else width
    if outer == 1:
        outer_stride = row * tokens
    if tensor.stride(-1) != 1 or tensor.data_ptr() & 15 or row <= 0 or head <= 0 or outer_stride <= 0:
        return None
    if row * tensor.itemsize & 15 or outer_stride % row:
        return None
    if head < row:
        if head * (heads - 1) + width > row:
            return None
        head_row, head_column, columns = 0, head, head * (heads - 1) + width
    elif head % row == 0:
        head_row, head_column, columns = head // row, 0, width
    else:
        return None
    rows = (outer - 1) * (outer_stride // row) + (heads - 1) * head_row + tokens
    apart = outer_stride // row if tensor.ndim == 4 else 0
    return Rows(tensor.as_strided((rows, columns), (row, 1)), apart, head_row, head_column)
