"""From a call of `fused_moe` to its launches: place, multiply, multiply, sum.

Nothing is read back from the device, and grids depend on the number of tokens alone, so a call can be captured.
"""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch
from torch import Tensor

from kernelhub.backends.gluon.gemm.grouped.adapter import as_rows
from kernelhub.backends.gluon.language import gl
from kernelhub.backends.gluon.launch import Launcher
from kernelhub.backends.gluon.moe.places import place_kernel
from kernelhub.backends.gluon.moe.rows import sum_kernel
from kernelhub.backends.shared.pairs import count_kernel
from kernelhub.backends.shared.repeated_experts import RepeatedExperts
from kernelhub.backends.shared.sorted_sizes import (
    COUNTED_AT_ONCE,
    PIECE,
    PIECE_OF_FEW,
    bins_of,
    most_tiles,
    size_of_counts,
    tokens_of_a_round,
)
from kernelhub.ops.moe.experts.adapter import Values
from kernelhub.ops.moe.experts.problem import ExpertsProblem
from kernelhub.ops.moe.experts.weights import Matrix

# The most pairs that every program counts for itself: 2 passes, against the launch of another kernel.
_COUNTED_ALONE = 2048
_SUMMED_AT_ONCE = 1024
# Rows of an expert on average, up to which tiles of 64 are taken: an expert's second tile reads its weights once more.
# In float8 64 rows take 1.01 of the time in tiles of 64 with Qwen3 30B-A3B on an H200, and 32 rows 0.98
# (gluon_experts_h200.json); in bfloat16 64 rows 1.03 (gluon_more_h200.json).
_FEW_ROWS = 48
TYPES = {torch.float32: gl.float32, torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


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


class Layer(RepeatedExperts):
    """Rows sorted by expert, both products over one list of tiles, and the sum of what the experts of a token add."""

    def __init__(self, problem: ExpertsProblem) -> None:
        super().__init__(problem)
        self._dtype: torch.dtype = getattr(torch, problem.dtype)
        # What experts add may be beyond float16 where their sum is not.
        self._added_dtype = torch.bfloat16 if self._dtype is torch.bfloat16 else torch.float32
        self._bins = bins_of(problem.num_experts)
        choices = {
            "TOP_K": problem.top_k,
            "EXPERTS": problem.num_experts,
            "EXPERTS_PAD": self._bins,
            "HAS_MAP": problem.expert_map,
        }
        self._count = Launcher(count_kernel, {**choices, "PIECE": PIECE}, num_warps=8)
        self._place = {
            (piece, block, rows): Launcher(
                place_kernel,
                {**choices, "HAS_COUNTS": counted, "BM": rows, "PIECE": piece, "BLOCK": block},
                num_warps=piece // 32,
            )
            for piece, counted, block in (
                (PIECE_OF_FEW, False, PIECE_OF_FEW),
                (PIECE_OF_FEW, False, COUNTED_AT_ONCE),
                (PIECE, True, COUNTED_AT_ONCE),
            )
            for rows in (64, 128)
        }
        summed = {
            "N": problem.hidden_size,
            "TOP_K": problem.top_k,
            "ON_INPUT": problem.apply_router_weight_on_input,
            "HAS_RESIDUAL": problem.residual,
        }
        self._sum = Launcher(sum_kernel, {**summed, "BLOCK": _SUMMED_AT_ONCE})

    def arrange(self, w13: Matrix, w2: Matrix) -> tuple[Matrix, Matrix]:
        """Weights that TMA can read as they are, or copies."""
        return w13._replace(weight=_readable(w13.weight)), w2._replace(weight=_readable(w2.weight))

    def workspace_bytes(self, num_tokens: int) -> int:
        problem, step = self.problem, self._round(num_tokens)
        pairs = step * problem.top_k
        made = self._bytes_between(step) + pairs * problem.hidden_size * self._added_dtype.itemsize
        metadata = 2 * pairs + 3 * most_tiles(pairs, problem.num_experts, 64) + 1 + self._size_of_counts(pairs)
        return int(made + 4 * metadata)

    def _launch(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
    ) -> None:
        """One round."""
        (tokens, hidden), device = x.shape, x.get_device()
        placed = self._sort(topk_ids, values.expert_map, self._rows(tokens))
        added = x.new_empty((topk_ids.numel(), hidden), dtype=self._added_dtype)
        self._multiply_both(x, w13, w2, topk_weights, placed, values, added)
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

    @abc.abstractmethod
    def _multiply_both(
        self, x: Tensor, w13: Matrix, w2: Matrix, router: Tensor, placed: Placed, values: Values, added: Tensor
    ) -> None:
        """Write what each pair adds into `added` [pairs, hidden_size], in the order of places."""

    @abc.abstractmethod
    def _bytes_between(self, tokens: int) -> int:
        """Device memory of what is made before the second product."""

    def _sort(self, topk_ids: Tensor, expert_map: Tensor | None, height: int) -> Placed:
        """Places of pairs, and tiles of so many rows."""
        pairs = topk_ids.numel()
        counted = pairs > _COUNTED_ALONE
        piece = PIECE if counted else PIECE_OF_FEW
        block = COUNTED_AT_ONCE if counted or pairs > PIECE_OF_FEW else PIECE_OF_FEW
        pieces, most = -(-pairs // piece), most_tiles(pairs, self.problem.num_experts, height)
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

    def _rows(self, num_tokens: int) -> int:
        """Of a tile."""
        return 64 if num_tokens * self.problem.top_k <= _FEW_ROWS * self.problem.num_experts else 128

    def _round(self, num_tokens: int) -> int:
        """Tokens at a time."""
        row_bytes = self.problem.top_k * self.problem.hidden_size * self._added_dtype.itemsize
        return tokens_of_a_round(num_tokens, row_bytes)

    def _size_of_counts(self, pairs: int) -> int:
        """Of the counts of every piece, where another launch makes them."""
        return size_of_counts(pairs, self._bins) if pairs > _COUNTED_ALONE else 0


def _readable(weight: Tensor) -> Tensor:
    """Weights [E, N, K] that `as_rows` takes as they are: these, or a copy."""
    rows, apart = as_rows(weight)
    if rows.data_ptr() == weight.data_ptr():
        return weight
    return rows.as_strided(weight.shape, (apart * rows.stride(0), rows.stride(0), 1))
