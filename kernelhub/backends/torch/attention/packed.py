"""CPU attention with GQA groups packed as query rows.

ATen's CPU flash attention needs one KV head per query head and copies KV to get it, which makes decode
read the cache H / KH times over. Here the query heads that share a KV head become rows of one query
instead, row = (token, head in group), and KV is read once, in place:

    for each block of query tokens:
        low, high = the keys that some row of the block sees
        o, lse = flash(rows, k[low:high], v[low:high], mask)

A sink is one more term of the softmax denominator, applied to finished rows:
o *= sigmoid(lse - sink), lse = log(exp(lse) + exp(sink)).

In bfloat16 the operator's exp gives a number for NaN, so that a row with an infinite score would be finite.

The operator takes the weight of a score that is 87 or more below the largest of its row, less than 1.7e-38, for 0.

float16 and fp8 are computed in float32, since the CPU's float16 products are several times slower.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.shared.operands import adjacent
from kernelhub.backends.torch.attention.sequences import (
    dense_sequences,
    gathered,
    nhd,
    paged_sequences,
    visible_keys,
    widened,
)
from kernelhub.ops.attention.adapter import AttentionAdapter, DenseStep, PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import AttentionProblem, PagedAttentionProblem
from kernelhub.ops.precision import at_own_precision

# Query tokens per block: 128 to 512 are within 10 % of each other for prefill of 512 and 2048 tokens with
# 32/8 heads of 128 in bfloat16 and float32; 32 is 25 % slower (2 cores, torch 2.13).
BLOCK = 256

# Gathered keys and values of as many bytes are read again from the last-level cache: one sequence of 2048 tokens at a
# time instead of eight (8 KV heads of 128, bfloat16, 32 MB of cache) takes three quarters of the time.
GATHERED_BYTES = 8 << 20

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Packed(AttentionAdapter[AttentionProblem, DenseStep]):
    """`attention` on the CPU."""

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
        attend = _Attend(self.problem, values)
        if step.cu_seqlens_q is None:
            attend.batch(q, k, v, out, lse)
        else:
            for sequence in dense_sequences(q, k, v, step, out, lse):
                attend.one(*sequence)


class PackedPaged(AttentionAdapter[PagedAttentionProblem, PagedStep]):
    """`paged_attention` on the CPU: pages are gathered, or taken in place where they are adjacent."""

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
        attend = _Attend(self.problem, values)
        k, v = nhd(k, self.problem.kv_layout), nhd(v, self.problem.kv_layout)
        lengths = step.lengths()
        if len(lengths) > 1 and min(lengths) == max(lengths) > 0 and step.cu_seqlens_q is None:
            attend.equal_pages(q, k, v, step.block_table, lengths[0], out, lse)
        else:
            for sequence in paged_sequences(q, k, v, step, values.window_left, out, lse):
                attend.one(*sequence)


class _Attend:
    """The features of one call, applied to batches of sequences of equal shape."""

    def __init__(self, problem: AttentionProblem, values: Values) -> None:
        self.dtype = torch.bfloat16 if problem.q_dtype == problem.kv_dtype == "bfloat16" else torch.float32
        self.scale, self.left, self.right, _, sinks, self.k_scale, self.v_scale = values
        self.sinks = None if sinks is None else sinks.float()

    def one(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """A single sequence: q [S, H, D], k and v [L, KH, D], out [S, H, D], lse [H, S]."""
        self.batch(q[None], k[None], v[None], out[None], None if lse is None else lse[None])

    def equal_pages(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_table: Tensor,
        length: int,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Sequences of equal length over NHD caches, as many at a time as their gathered pages stay in the cache."""
        if q.ndim == 3:
            q, out, lse = q.unsqueeze(1), out.unsqueeze(1), None if lse is None else lse.T.unsqueeze(2)
        page_size = k.shape[1]
        keys = visible_keys(length, q.shape[1], self.left)
        first = keys.start // page_size
        pages = block_table[:, first : -(-length // page_size)].long()
        inside = slice(keys.start - first * page_size, length - first * page_size)
        bytes_each = pages.shape[1] * (k[0].numel() * k.itemsize + v[0].numel() * v.itemsize)
        at_once = max(1, GATHERED_BYTES // max(1, bytes_each))
        for start in range(0, len(pages), at_once):
            some = slice(start, start + at_once)
            k_some, v_some = (gathered(tag, cache, pages[some])[:, inside] for tag, cache in (("k", k), ("v", v)))
            self.batch(q[some], k_some, v_some, out[some], None if lse is None else lse[some])

    def batch(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """q [B, S, H, D], k and v [B, L, KH, D], out [B, S, H, D], lse [B, H, S]."""
        tokens, length = q.shape[1], k.shape[1]
        first = self._first_seeing(tokens, length)
        if first:
            out[:, :first] = 0.0
            if lse is not None:
                lse[:, :, :first] = -torch.inf if self.sinks is None else self.sinks[:, None]
        # The operator takes adjacent elements for granted: torch 2.13 gives wrong numbers otherwise, without an error.
        k = adjacent(widened("k wide", k, self.k_scale, self.dtype)).transpose(1, 2)
        v = adjacent(widened("v wide", v, self.v_scale, self.dtype)).transpose(1, 2)
        for start in range(first, tokens, BLOCK):
            rows = slice(start, min(start + BLOCK, tokens))
            self._block(
                q[:, rows],
                k,
                v,
                length - tokens + start,
                out[:, rows],
                None if lse is None else lse[:, :, rows],
            )

    def _first_seeing(self, tokens: int, length: int) -> int:
        """The first query that sees a key: all before it are too far left of the first key."""
        if length == 0:
            return tokens
        return 0 if self.right < 0 else min(tokens, max(0, tokens - length - self.right))

    def _block(self, q: Tensor, k: Tensor, v: Tensor, position: int, out: Tensor, lse: Tensor | None) -> None:
        """Queries q [B, S, H, D], the first at `position`, over k and v [B, KH, L, D]."""
        batch, tokens, heads, width = q.shape
        kv_heads, length = k.shape[1], k.shape[2]
        group = heads // kv_heads
        low = max(0, position - self.left) if self.left >= 0 else 0
        high = min(length, position + tokens + self.right) if self.right >= 0 else length
        rows = q.to(self.dtype).unflatten(2, (kv_heads, group)).permute(0, 2, 1, 3, 4)
        o, row_lse = _flash(
            adjacent(rows.reshape(batch, kv_heads, tokens * group, width)),
            k[:, :, low:high],
            v[:, :, low:high],
            0.0,
            False,
            attn_mask=self._mask(position, tokens, group, low, high),
            scale=self.scale,
        )
        if self.dtype is torch.bfloat16:
            infinite = row_lse == torch.inf
            if infinite.any():
                o = o.masked_fill(infinite.unsqueeze(3), torch.nan)
        o = o.unflatten(2, (tokens, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
        row_lse = row_lse.unflatten(2, (tokens, group)).transpose(2, 3).flatten(1, 2)
        if self.sinks is not None:
            sink = self.sinks[:, None]
            o = o * torch.sigmoid(row_lse - sink).transpose(1, 2).unsqueeze(3)
            row_lse = torch.logaddexp(row_lse, sink)
        out.copy_(o)
        if lse is not None:
            lse.copy_(row_lse)

    def _mask(self, position: int, tokens: int, group: int, low: int, high: int) -> Tensor | None:
        """Additive mask [tokens * group, high - low], or None if every row sees every key."""
        cut_right = self.right >= 0 and position + self.right < high - 1
        cut_left = self.left >= 0 and position + tokens - 1 - self.left > low
        if not (cut_right or cut_left):
            return None
        at = torch.arange(position, position + tokens, device="cpu")[:, None]
        key = torch.arange(low, high, device="cpu")[None, :]
        hidden = torch.zeros(tokens, high - low, dtype=torch.bool, device="cpu")
        if cut_right:
            hidden |= key > at + self.right
        if cut_left:
            hidden |= key < at - self.left
        mask = torch.zeros(tokens, high - low, dtype=self.dtype, device="cpu").masked_fill_(hidden, -torch.inf)
        return mask.repeat_interleave(group, 0)[None, None]
