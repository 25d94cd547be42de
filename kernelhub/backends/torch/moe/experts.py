"""One expert at a time: its rows, grouped on the host, through matrix products of torch.

    for each expert that has rows: y[rows] = act(a[rows] w13^T) w2^T      a: tokens, quantised if they are to be
    out = sum over a token's choices of y, in their order

Quantised weights are decoded for experts that are hit only, a block of rows at a time that stays in the cache, to a
dtype that holds codes (and scales that are powers of two) exactly; scales of channels are multiplied in afterwards, and
so is a factor of 8 of mxfp4, whose largest element, 6 x 2^127, is no number of any such dtype.
Float16 has neither the range of products before their scales nor that of small scales: its products are float32's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.formats import E4M3, from_e2m1, from_e8m0, from_int4
from kernelhub.ops.graph_memory import may_keep
from kernelhub.ops.host import on_host
from kernelhub.ops.moe.experts.activations import SMALLEST_AMAX, Activations, inner_least
from kernelhub.ops.moe.experts.adapter import ExpertsAdapter, Values
from kernelhub.ops.moe.experts.problem import (
    BLOCK_FORMATS,
    FLOATS,
    FOUR_BIT_FORMATS,
    FP8_BLOCK_GATE_UP,
    MXFP4,
    MXINT4,
    PLAIN,
    ExpertsProblem,
)
from kernelhub.ops.moe.experts.reference import ROUNDED_FIRST, joined, local_ids
from kernelhub.ops.moe.experts.weights import BLOCK, GROUP, Matrix
from kernelhub.ops.precision import at_own_precision
from kernelhub.runtime.scratch import scratch

_MOST_ADDED = 1 << 26  # elements of what experts add, 256 MB; more tokens than that come in several rounds
_DECODED = 1 << 20  # elements of decoded weights, 2 MB in bfloat16
_LEFT_OF_MXFP4 = 8.0


class Experts(ExpertsAdapter):
    """`fused_moe` anywhere."""

    def __init__(self, problem: ExpertsProblem) -> None:
        super().__init__(problem)
        exact = problem.dtype
        # Of halves a GPU gives sums in float32.
        self._sums = problem.weights == PLAIN and problem.device.type == "cuda" and torch.version.hip is None
        # Codes times float32 scales of activations need more digits than halves have.
        if problem.activation_dtype not in FLOATS or (exact == "float16" and not self._sums):
            exact = "float32"
        self._dtype: torch.dtype = getattr(torch, exact)
        self._activations = Activations(problem.activation_dtype, problem.weights in BLOCK_FORMATS)
        self._least = inner_least(problem.activation_dtype)
        self._tables: dict[bool, Tensor] = {}

    @at_own_precision
    def launch(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
    ) -> None:
        tokens = self._round(x.shape[0])
        for start in range(0, x.shape[0], tokens):
            rows = slice(start, start + tokens)
            residual = None if values.residual is None else values.residual[rows]
            added = self._added(x[rows], w13, w2, topk_weights[rows], topk_ids[rows], values)
            out[rows] = added if residual is None else added.add_(residual)

    def workspace_bytes(self, num_tokens: int) -> int:
        problem = self.problem
        return self._round(num_tokens) * problem.top_k * (problem.hidden_size + problem.intermediate_size) * 4

    def _round(self, num_tokens: int) -> int:
        """Tokens at a time."""
        return max(1, min(num_tokens, _MOST_ADDED // (self.problem.top_k * self.problem.hidden_size)))

    def _added(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values
    ) -> Tensor:
        """float32 [T, H]: the sum over all experts."""
        problem, (tokens, top_k) = self.problem, topk_ids.shape
        local = local_ids(topk_ids, values.expert_map, problem.num_experts).flatten()
        order = torch.sort(local, stable=True).indices
        counts = on_host(torch.bincount(local + 1, minlength=problem.num_experts + 1), "topk_ids")
        shape = (tokens * top_k, problem.hidden_size)
        added = scratch("moe added", shape, torch.float32, x.device)
        if counts[0]:
            added[order[: counts[0]]] = 0.0
        inputs, router = self._multiplied(x, values.a1_scale), topk_weights.reshape(-1, 1)
        at = counts[0]
        for expert, count in enumerate(counts[1:]):
            if not count:
                continue
            rows = order[at : at + count]
            at += count
            weight = router[rows]
            both = self._product(inputs[rows // top_k], w13, expert)
            if problem.apply_router_weight_on_input:
                both.mul_(weight)
            if w13.bias is not None:
                both.add_(w13.bias[expert])
            if problem.activation_dtype == FP8_BLOCK_GATE_UP:
                both = self._activations.rounded(both, None, torch.float32, self._least)
            inner = joined(both, problem.activation, values.alpha, values.limit)
            if problem.activation_dtype in ROUNDED_FIRST:
                inner = inner.to(x.dtype)
            result = self._product(self._multiplied(inner, values.a2_scale, self._least), w2, expert)
            if w2.bias is not None:
                result.add_(w2.bias[expert])
            if not problem.apply_router_weight_on_input:
                result.mul_(weight)
            added[rows] = result
        return added.view(tokens, top_k, -1).sum(1)

    def _multiplied(self, rows: Tensor, scale: Tensor | None, least: float = SMALLEST_AMAX) -> Tensor:
        """Activations as the products take them."""
        return self._activations.rounded(rows, scale, self._dtype, least)

    def _product(self, rows: Tensor, matrix: Matrix, expert: int) -> Tensor:
        """float32 [R, N]: rows by one expert's weights."""
        weight = matrix.weight[expert]
        if self.problem.weights == PLAIN:
            if self._sums and rows.dtype is torch.float16:
                return torch.mm(rows, weight.t(), out_dtype=torch.float32)
            if weight.dtype is rows.dtype:
                return torch.mm(rows, weight.t()).float()
        step = max(BLOCK, _DECODED // rows.shape[1] // BLOCK * BLOCK) if rows.device.type == "cpu" else weight.shape[0]
        result = torch.empty(rows.shape[0], weight.shape[0], dtype=torch.float32, device=rows.device)
        for start in range(0, weight.shape[0], step):
            part = slice(start, start + step)
            result[:, part] = torch.mm(rows, self._decoded(matrix, expert, part).t())
        if self.problem.weights == MXFP4:
            result.mul_(_LEFT_OF_MXFP4)
        if matrix.channel_scale is not None:
            result.mul_(matrix.channel_scale[expert])
        return result

    def _decoded(self, matrix: Matrix, expert: int, rows: slice) -> Tensor:
        """A block of one expert's weights, scales of blocks and groups multiplied in."""
        codes = matrix.weight[expert, rows]
        if self.problem.weights == PLAIN:
            return codes.to(self._dtype)
        count = codes.shape[0]
        if codes.device.type == "cpu" or self.problem.weights in FOUR_BIT_FORMATS:
            values = self._looked_up(codes).view(count, -1)
        else:
            values = codes.to(self._dtype)
        width = values.shape[1]
        if matrix.scale is None:
            return values
        if self.problem.weights in FOUR_BIT_FORMATS:
            group = GROUP[self.problem.weights]
            factors = _scales(matrix.scale[expert, rows], self._dtype)
            if self.problem.weights == MXFP4:
                factors = factors / _LEFT_OF_MXFP4
            return values.view(count, -1, group).mul_(factors.unsqueeze(2)).view(count, -1)
        blocks = slice(rows.start // BLOCK, -(-(rows.start + count) // BLOCK))
        factors = _scales(matrix.scale[expert, blocks], self._dtype)
        if count % BLOCK or width % BLOCK:
            return values.mul_(factors.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:count, :width])
        values.view(-1, BLOCK, width // BLOCK, BLOCK).mul_(factors[:, None, :, None])
        return values

    def _looked_up(self, codes: Tensor) -> Tensor:
        """Codes as floats, by a table of what a byte means, or of what two do where that is 8 bytes at most.

        The CPU's own conversion of float8 takes one element at a time: 2^20 take 3.3 ms to bfloat16, 0.24 ms this way
        (one core, torch 2.13).
        """
        raw = codes.contiguous().view(torch.uint8).view(-1)
        per_byte = 2 if self.problem.weights in FOUR_BIT_FORMATS else 1
        two = 2 * per_byte * self._dtype.itemsize <= 8 and raw.numel() % 2 == 0 and raw.storage_offset() % 2 == 0
        table = self._tables.get(two)
        if table is None:
            every = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8)
            if per_byte == 2:
                decode = from_int4 if self.problem.weights == MXINT4 else from_e2m1
                one = decode(every.unsqueeze(1), self._dtype)
            else:
                one = every.view(E4M3).to(self._dtype)
            one = one.view(256, per_byte)
            if two:  # the first of two bytes is the low one
                one = torch.stack([one.repeat(256, 1), one.repeat_interleave(256, 0)], 1).view(65536, -1)
            words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.shape[1] * self._dtype.itemsize]
            table = one.view(words).flatten().to(codes.device)
            if may_keep(table):
                self._tables[two] = table
        keys = (raw.view(torch.uint16) if two else raw).to(torch.int32)
        return table.index_select(0, keys).view(self._dtype)


def _scales(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (from_e8m0(scale) if scale.dtype is torch.uint8 else scale).to(dtype)
