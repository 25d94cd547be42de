"""From a call of `fused_moe` to its launches: place, code, multiply, multiply, sum.

Nothing is read back from the device, and grids depend on the number of tokens alone, so a call can be captured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernelhub.backends.gluon.gemm.grouped.adapter import as_rows
from kernelhub.backends.gluon.language import gl
from kernelhub.backends.gluon.launch import Launcher, descriptor
from kernelhub.backends.gluon.moe.places import place_kernel
from kernelhub.backends.gluon.moe.product import experts_kernel
from kernelhub.backends.gluon.moe.rows import code_kernel, sum_kernel
from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.pairs import count_kernel
from kernelhub.ops.formats import E4M3
from kernelhub.ops.moe.experts.adapter import ExpertsAdapter, Values
from kernelhub.ops.moe.experts.problem import FP8_BLOCK_UE8M0, ExpertsProblem
from kernelhub.ops.moe.experts.weights import BLOCK, Matrix

# Bytes of what experts add; more tokens than that come in several rounds.
_MOST_ADDED = 1 << 30
# Pairs that a program places: more compare each with more others, and fewer read more counts of pieces.
_FEW_PAIRS, _PIECE = 128, 256
# Pairs that a program counts at once, and the most that every program counts for itself: 2 passes, against the launch
# of another kernel.
_COUNTED_AT_ONCE = 1024
_COUNTED_ALONE = 2048
_LEAST_BINS = 32  # of a histogram: one for each thread of a warp
_CODED_AT_ONCE = 8  # times 128 columns
_SUMMED_AT_ONCE = 1024
# Rows of an expert on average, up to which tiles of 64 are taken: an expert's second tile reads its weights once more,
# from L2 if they are few. On an H100, 64 rows on average take 0.86 of the time in tiles of 64 with Qwen3 30B-A3B, whose
# experts have 3 MB in their first matrix, and 1.27 with DeepSeek V3.2, whose have 29 MB (gluon_rows_h100.json).
_FEW_ROWS, _FEWER_ROWS = 64, 48
_KEPT_BYTES = 8 << 20
_TYPES = {torch.float32: gl.float32, torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


class Placed(NamedTuple):
    """Where pairs and tiles are, int32 on the device.

    Attributes:
        places: of pairs, -1 for those that are left out.
        pairs: of places.
        experts, rows, ends: of tiles: whose they are, where they begin and where the expert's rows end.
        num_tiles: how many there are.
    """

    places: Tensor
    pairs: Tensor
    experts: Tensor
    rows: Tensor
    ends: Tensor
    num_tiles: Tensor


class Experts(ExpertsAdapter):
    """float8 scaled by blocks: rows sorted by expert, both products over one list of tiles."""

    def __init__(self, problem: ExpertsProblem) -> None:
        super().__init__(problem)
        self._dtype: torch.dtype = getattr(torch, problem.dtype)
        # What experts add may be beyond float16 where their sum is not.
        self._added_dtype = torch.bfloat16 if self._dtype is torch.bfloat16 else torch.float32
        self._kept = 2 * problem.intermediate_size * problem.hidden_size <= _KEPT_BYTES
        self._padded = max(_LEAST_BINS, triton.next_power_of_2(problem.num_experts))
        choices = {
            "TOP_K": problem.top_k,
            "EXPERTS": problem.num_experts,
            "EXPERTS_PAD": self._padded,
            "HAS_MAP": problem.expert_map,
        }
        self._count = Launcher(count_kernel, {**choices, "PIECE": _PIECE}, num_warps=8)
        self._place = {
            (piece, block, rows): Launcher(
                place_kernel,
                {**choices, "HAS_COUNTS": counted, "BM": rows, "PIECE": piece, "BLOCK": block},
                num_warps=piece // 32,
            )
            for piece, counted, block in (
                (_FEW_PAIRS, False, _FEW_PAIRS),
                (_FEW_PAIRS, False, _COUNTED_AT_ONCE),
                (_PIECE, True, _COUNTED_AT_ONCE),
            )
            for rows in (64, 128)
        }
        self._code = Launcher(code_kernel, {"K": problem.hidden_size, "BLOCK": _CODED_AT_ONCE})
        summed = {
            "N": problem.hidden_size,
            "TOP_K": problem.top_k,
            "ON_INPUT": problem.apply_router_weight_on_input,
            "HAS_RESIDUAL": problem.residual,
        }
        self._sum = Launcher(sum_kernel, {**summed, "BLOCK": _SUMMED_AT_ONCE})
        self._products = {
            (first, rows): Launcher(experts_kernel, self._static(first, rows))
            for first in (True, False)
            for rows in (64, 128)
        }

    def arrange(self, w13: Matrix, w2: Matrix) -> tuple[Matrix, Matrix]:
        """Weights that TMA can read as they are, or copies."""
        return w13._replace(weight=_readable(w13.weight)), w2._replace(weight=_readable(w2.weight))

    def launch(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
    ) -> None:
        step = self._round(x.shape[0])
        with on_device_of(x):
            if step == x.shape[0]:
                self._launch(x, w13, w2, topk_weights, topk_ids, values, out)
                return
            for start in range(0, x.shape[0], step):
                rows = slice(start, start + step)
                residual = None if values.residual is None else values.residual[rows]
                routed = (topk_weights[rows], topk_ids[rows])
                self._launch(x[rows], w13, w2, *routed, values._replace(residual=residual), out[rows])

    def tiles(self, num_tokens: int) -> str:
        return f"{self._rows(self._round(num_tokens))} x (128 + 128), 128 columns a step"

    def workspace_bytes(self, num_tokens: int) -> int:
        problem, step = self.problem, self._round(num_tokens)
        pairs, groups = step * problem.top_k, -(-problem.hidden_size // BLOCK)
        inner = problem.intermediate_size // BLOCK
        made = step * groups * (BLOCK + 4) + pairs * inner * (BLOCK + 4)
        made += pairs * problem.hidden_size * self._added_dtype.itemsize
        metadata = 2 * pairs + 3 * self._most_tiles(pairs, 64) + 1 + self._size_of_counts(pairs)
        return int(made + 4 * metadata)

    def _launch(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
    ) -> None:
        """One round."""
        problem, (tokens, hidden), pairs = self.problem, x.shape, topk_ids.numel()
        inner, height, device = problem.intermediate_size, self._rows(x.shape[0]), x.get_device()
        placed = self._sort(topk_ids, values.expert_map, height)
        groups, of_x = -(-hidden // BLOCK), x.stride()
        codes = x.new_empty((tokens, groups * BLOCK), dtype=E4M3)
        scales = x.new_empty((tokens, groups), dtype=torch.float32)
        self._code(
            -(-tokens * groups // _CODED_AT_ONCE),
            (device, of_x) if not x.data_ptr() & 15 else None,
            x,
            codes,
            scales,
            tokens,
            *of_x,
        )
        joined = x.new_empty((pairs, inner), dtype=E4M3)
        joined_scales = x.new_empty((inner // BLOCK, pairs), dtype=torch.float32)
        whole = (topk_weights, placed, values)
        self._multiply(True, height, codes, scales, w13, *whole, joined, joined_scales)
        added = x.new_empty((pairs, hidden), dtype=self._added_dtype)
        self._multiply(False, height, joined, joined_scales.t(), w2, *whole, added, None)
        residual = values.residual
        of_residual = (0, 0) if residual is None else residual.stride()
        of_out = out.stride()
        aligned = not (out.data_ptr() | (0 if residual is None else residual.data_ptr())) & 15
        self._sum(
            tokens * -(-hidden // _SUMMED_AT_ONCE),
            (device, of_residual, of_out) if aligned else None,
            added,
            placed.places,
            topk_weights,
            residual,
            out,
            *topk_weights.stride(),
            *of_residual,
            *of_out,
        )

    def _sort(self, topk_ids: Tensor, expert_map: Tensor | None, height: int) -> Placed:
        """Places of pairs, and tiles of so many rows."""
        pairs = topk_ids.numel()
        counted = pairs > _COUNTED_ALONE
        piece = _PIECE if counted else _FEW_PAIRS
        block = _COUNTED_AT_ONCE if counted or pairs > _FEW_PAIRS else _FEW_PAIRS
        pieces, most = -(-pairs // piece), self._most_tiles(pairs, height)
        sizes = (pairs, pairs, most, most, most, 1, self._size_of_counts(pairs))
        *results, counts = topk_ids.new_empty(sum(sizes)).split_with_sizes(sizes)
        placed = Placed(*results)
        table = (0, 0) if expert_map is None else (expert_map.numel(), expert_map.stride(0))
        varying = (table[0], *topk_ids.stride(), table[1])
        variant = (topk_ids.get_device(),)
        if counted:
            self._count(pieces, variant, topk_ids, expert_map, counts, pairs, *varying)
        place = self._place[piece, block, height]
        place(pieces, variant, topk_ids, expert_map, counts, *placed, pairs, pieces, *varying)
        return placed

    def _multiply(
        self,
        first: bool,
        height: int,
        a: Tensor,
        a_scale: Tensor,
        matrix: Matrix,
        router: Tensor,
        placed: Placed,
        values: Values,
        out: Tensor,
        out_scale: Tensor | None,
    ) -> None:
        """One product of all experts."""
        problem, (pairs, n), bias = self.problem, out.shape, matrix.bias
        weight, scale = as_rows(matrix.weight), matrix.scale
        assert scale is not None
        across = -(-n // (128 if first else 256))
        strides = (*scale.stride(), *((0, 0) if bias is None else bias.stride()))
        self._products[first, height](
            min(problem.device.num_sms, self._most_tiles(pairs, height) * across),
            (out.get_device(), strides[:3], None if bias is None else bias.dtype),
            a,
            descriptor(a, (height, 128)),
            descriptor(weight.matrix, (128, 128)),
            out,
            out_scale,
            a_scale,
            scale,
            bias,
            router,
            placed.pairs,
            placed.experts,
            placed.rows,
            placed.ends,
            placed.num_tiles,
            across,
            n if first else 128,
            n,
            problem.hidden_size if first else a.shape[1],
            weight.apart,
            *a_scale.stride(),
            *strides,
            *router.stride(),
            n,
            pairs,
            float(values.alpha),
            float(values.limit),
        )

    def _static(self, first: bool, rows: int) -> dict[str, Any]:
        problem = self.problem
        return {
            "BM": rows,
            "STAGES": 4 if rows == 128 else 5,
            "TOP_K": problem.top_k,
            "B_E8M0": problem.weights == FP8_BLOCK_UE8M0,
            "HAS_BIAS": problem.w13_bias if first else problem.w2_bias,
            "ON_INPUT": first and problem.apply_router_weight_on_input,
            "FIRST": first,
            "ACTIVATION": problem.activation,
            "HALF": _TYPES[self._dtype],
            # Without turns 4096 tokens take 0.98 (Qwen3 30B-A3B) to 1.08 (DeepSeek V3.2) of the time (gluon_h200.json).
            "TURNS": rows == 128,
            # float32 fills sectors of memory as it is, and is too wide for the shared memory that is left.
            "BY_LINES": first or self._added_dtype is torch.bfloat16,
        }

    def _rows(self, num_tokens: int) -> int:
        """Of a tile."""
        few = _FEW_ROWS if self._kept else _FEWER_ROWS
        return 64 if num_tokens * self.problem.top_k <= few * self.problem.num_experts else 128

    def _round(self, num_tokens: int) -> int:
        """Tokens at a time."""
        row_bytes = self.problem.top_k * self.problem.hidden_size * self._added_dtype.itemsize
        return max(1, min(num_tokens, _MOST_ADDED // row_bytes))

    def _size_of_counts(self, pairs: int) -> int:
        """Of the counts of every piece, where another launch makes them."""
        return -(-pairs // _PIECE) * self._padded if pairs > _COUNTED_ALONE else 0

    def _most_tiles(self, pairs: int, height: int) -> int:
        """The most tiles that pairs can come to, however they are spread."""
        hit = min(pairs, self.problem.num_experts)
        return hit + (pairs - hit) // height


def _readable(weight: Tensor) -> Tensor:
    """Weights [E, N, K] that `as_rows` takes as they are: these, or a copy."""
    rows, apart = as_rows(weight)
    if rows.data_ptr() == weight.data_ptr():
        return weight
    return rows.as_strided(weight.shape, (apart * rows.stride(0), rows.stride(0), 1))
