"""Attention in float32 with every feature, on any device: the last resort.

A block of queries at a time, so that the scores of one block, not of a whole sequence, are in memory:

    for each sequence, for each block of queries:
        scores = scale * q k^T over the keys that some query of the block sees, in float32
        softcap, mask, append sinks, softmax, times v
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.torch.attention.sequences import dense_sequences, nhd, paged_sequences, widened
from kernelhub.ops.attention.adapter import AttentionAdapter, DenseStep, PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import AttentionProblem, PagedAttentionProblem
from kernelhub.ops.precision import at_own_precision

_SCORES_PER_BLOCK = 1 << 24  # 64 MB of float32


class Blocked(AttentionAdapter[AttentionProblem, DenseStep]):
    """`attention` anywhere."""

    @at_own_precision
    def launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: DenseStep,
        values: Values,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        attend = _Attend(values)
        for sequence in dense_sequences(q, k, v, step, out, lse):
            attend.one(*sequence)


class BlockedPaged(AttentionAdapter[PagedAttentionProblem, PagedStep]):
    """`paged_attention` anywhere, over gathered pages."""

    @at_own_precision
    def launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: PagedStep,
        values: Values,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        attend = _Attend(values)
        k, v = nhd(k, self.problem.kv_layout), nhd(v, self.problem.kv_layout)
        for sequence in paged_sequences(q, k, v, step, values.window_left, out, lse):
            attend.one(*sequence)


class _Attend:
    """The features of one call, applied to one sequence after the other."""

    def __init__(self, values: Values) -> None:
        self.scale, self.left, self.right, self.softcap, sinks, self.k_scale, self.v_scale = values
        self.sinks = None if sinks is None else sinks.float()

    def one(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """q [S, H, D], k [L, KH, D], v [L, KH, DV], out [S, H, DV], lse [H, S]."""
        tokens, length = q.shape[0], k.shape[0]
        k = widened("k wide", k, self.k_scale, torch.float32).transpose(0, 1)
        v = widened("v wide", v, self.v_scale, torch.float32).transpose(0, 1)
        block = max(1, _SCORES_PER_BLOCK // max(1, q.shape[1] * length))
        for start in range(0, tokens, block):
            rows = slice(start, min(start + block, tokens))
            self._block(q[rows], k, v, length - tokens + start, out[rows], None if lse is None else lse[:, rows])

    def _block(self, q: Tensor, k: Tensor, v: Tensor, position: int, out: Tensor, lse: Tensor | None) -> None:
        """Queries q [S, H, D], the first at `position`, over k and v [KH, L, D]."""
        tokens = q.shape[0]
        kv_heads, length = k.shape[0], k.shape[1]
        low = min(length, max(0, position - self.left)) if self.left >= 0 else 0
        high = min(length, max(low, position + tokens + self.right)) if self.right >= 0 else length
        rows = q.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        scores = torch.matmul(rows, k[:, low:high].transpose(1, 2)).mul_(self.scale)
        if self.softcap:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        scores = scores.unflatten(1, (-1, tokens)).flatten(0, 1)
        at = torch.arange(position, position + tokens, device=q.device)[:, None]
        key = torch.arange(low, high, device=q.device)[None, :]
        if self.right >= 0:
            scores.masked_fill_(key > at + self.right, -torch.inf)
        if self.left >= 0:
            scores.masked_fill_(key < at - self.left, -torch.inf)
        row_lse = torch.logsumexp(scores, dim=2)
        if self.sinks is not None:
            row_lse = torch.logaddexp(row_lse, self.sinks[:, None])
        weights = scores.sub_(row_lse.nan_to_num(neginf=0.0)[..., None]).exp_()
        o = torch.matmul(weights.unflatten(0, (kv_heads, -1)).flatten(1, 2), v[:, low:high])
        out.copy_(o.unflatten(1, (-1, tokens)).permute(2, 0, 1, 3).flatten(1, 2))
        if lse is not None:
            lse.copy_(row_lse)
