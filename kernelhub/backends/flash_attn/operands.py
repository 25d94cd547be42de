"""Shared by the adapters: the operands that the libraries read, and the conversion of their results.

All of them read 16 bytes of q, k and v at once. Lengths, offsets and pages they load one by one, so those may begin
anywhere: FlashAttention-2 in block_info.h, -3 in seqlen.h and paged_kv.h, -4 as tensors of `assumed_align=4`. All take
the largest score of a row before they scale it. Only FlashAttention-4 supports sinks; elsewhere they are merged into
the result afterwards: with the log l of a denominator, a sink s makes it log(e^l + e^s), and the result 1 / (1 + e^(s -
l)) of what it was.
"""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch
from torch import Tensor

from kernelhub.backends.shared.operands import aligned, most_tokens, positive_scale, row_major
from kernelhub.ops.attention.adapter import AttentionAdapter, DenseStep, PagedStep, ProblemT, StepT
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import PagedAttentionProblem

__all__ = [
    "NO_LIMIT",
    "Ends",
    "FlashAdapter",
    "bound_of_keys",
    "bound_of_queries",
    "is_limited_beyond",
    "keep_tail",
    "one_length",
]

NO_LIMIT = 1 << 30  # a wider window sees everything; sums of positions stay within 32 bits


class Ends(NamedTuple):
    """Where the sequences of a call are, in the libraries' words.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: offsets of ragged operands, else None.
        max_seqlen_q, max_seqlen_k: upper bounds for ragged operands, else None.
        page_table, seqused_k: pages and lengths over a paged cache, else None.
    """

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    page_table: Tensor | None = None
    seqused_k: Tensor | None = None


class FlashAdapter(AttentionAdapter[ProblemT, StepT]):
    """A kernel of FlashAttention. A subclass makes the call.

    Attributes:
        knows_sinks: the library takes sinks itself, and its LSE holds them.
        loads_tiles: the library loads whole tiles of values, so that a NaN behind the last sequence, which it
            multiplies by zero, would reach the result.
    """

    knows_sinks = False
    loads_tiles = False

    def __init__(self, problem: ProblemT) -> None:
        super().__init__(problem)
        self._heads_first = isinstance(problem, PagedAttentionProblem) and problem.kv_layout == "HND"
        self._ragged = problem.ragged

    @abc.abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, ends: Ends, values: Values, out: Tensor, wants_lse: bool
    ) -> Tensor | None:
        """Run into `out`, [B, S, H, DV] or [T, H, DV], and return the LSE, [B, H, S] or [H, T], if it is wanted.

        There are keys, the operands are aligned (`is_aligned`) and the scale is above zero.
        """

    def launch(
        self, q: Tensor, k: Tensor, v: Tensor, step: StepT, values: Values, out: Tensor, lse: Tensor | None
    ) -> None:
        if isinstance(step, PagedStep):
            if self._heads_first:
                k, v = k.transpose(1, 2), v.transpose(1, 2)
            ends = _paged_ends(step, q, k.shape[1])
            keyless = not (step.max_pages and k.shape[0])
            if not self._ragged and q.ndim == 3:  # one query per sequence
                q, out = q.unsqueeze(1), out.unsqueeze(1)
                lse = None if lse is None else lse.t().unsqueeze(2)
        else:
            if self._ragged and self.loads_tiles:
                k, v = _ended(k, v, step)
            ends, keyless = _dense_ends(step, q, k), not k.shape[-3]
        if keyless:
            _without_keys(ends, values.sinks, out, lse)
            return
        q, scale = positive_scale(q, values.scale)
        if scale != values.scale:
            values = values._replace(scale=scale)
        after = values.sinks is not None and not self.knows_sinks
        wants_lse = after or lse is not None
        found = self.attend(aligned(q), aligned(k), aligned(v), ends, values, out, wants_lse)
        if not wants_lse or found is None:
            return
        found = torch.where(found == torch.inf, -torch.inf, found)  # some say inf where a row sees no key
        if after and values.sinks is not None:
            found = _with_sinks(found, values.sinks, ends, out)
        if lse is not None:
            lse.copy_(found)

    def result_bytes(self, num_tokens: int) -> int:
        """Of a result that the library allocates."""
        return num_tokens * self.problem.num_q_heads * self.problem.head_dim_vo * 2


def bound_of_queries(ends: Ends, tokens: int, wants_lse: bool) -> int:
    """The bound on queries per sequence that FlashAttention-2 is given with ragged ones.

    For a bound of one it takes heads for queries, counts on one query in each sequence, and may give an LSE in an order
    of its own (vLLM's build does).
    """
    assert ends.cu_seqlens_q is not None
    assert ends.max_seqlen_q is not None
    one_each = tokens == ends.cu_seqlens_q.shape[0] - 1
    return ends.max_seqlen_q if one_each and not wants_lse else max(2, ends.max_seqlen_q)


def bound_of_keys(queries: int | None, keys: int | None, values: Values) -> int | None:
    """The bound on keys per sequence that FlashAttention-2 is given: with a window, none below that on queries.

    A side that is no narrower than the bound on keys counts as one without a limit, and that as the bound: both are
    wrong for sequences of more queries than that.
    """
    if queries is None or keys is None or not is_limited_beyond(values, queries, keys):
        return keys
    return queries


def is_limited_beyond(values: Values, queries: int, keys: int) -> bool:
    """Whether FlashAttention-2, given such a bound on keys, would put a side of the window elsewhere."""
    return queries > keys and values.window_right != 0 and max(values.window_left, values.window_right) >= 0


def one_length(length: int, count: int, like: Tensor) -> Tensor:
    """Offsets of so many sequences of one length."""
    return torch.arange(0, count * length + 1, length, dtype=torch.int32, device=like.device)


def keep_tail(out: Tensor, made: Tensor, ends: Ends) -> None:
    """Copy a result, but for the tokens past the last sequence, which are left as they are."""
    if ends.cu_seqlens_q is None:
        out.copy_(made)
    else:
        out.copy_(torch.where(_within(ends.cu_seqlens_q, out.shape[0])[:, None, None], made, out))


def _within(cu_seqlens_q: Tensor, tokens: int) -> Tensor:
    """Which of the tokens of ragged queries belong to a sequence."""
    return torch.arange(tokens, device=cu_seqlens_q.device) < cu_seqlens_q[-1]


def _ended(k: Tensor, v: Tensor, step: DenseStep) -> tuple[Tensor, Tensor]:
    """Keys and values without the rows past the last sequence; those values are zeroed if the host has no offsets.

    A graph does not use the host's offsets: its replays may have others.
    """
    assert step.cu_seqlens_k is not None
    ends = step.known_k_offsets
    if ends is None or (v.is_cuda and torch.cuda.is_current_stream_capturing()):
        inside = torch.arange(v.shape[0], dtype=torch.int32, device=v.device) < step.cu_seqlens_k[-1]
        return k, torch.where(inside[:, None, None], v, v.new_zeros(()))
    return (k, v) if ends[-1] == v.shape[0] else (k[: ends[-1]], v[: ends[-1]])


def _dense_ends(step: DenseStep, q: Tensor, k: Tensor) -> Ends:
    if step.cu_seqlens_q is None or step.cu_seqlens_k is None:
        return Ends()
    return Ends(
        step.cu_seqlens_q.contiguous(),
        step.cu_seqlens_k.contiguous(),
        most_tokens(step.max_seqlen_q, q.shape[0]),
        most_tokens(step.max_seqlen_k, k.shape[0]),
    )


def _paged_ends(step: PagedStep, q: Tensor, page_size: int) -> Ends:
    table = step.block_table if step.block_table.stride(-1) == 1 else row_major(step.block_table)
    offsets = None if step.cu_seqlens_q is None else step.cu_seqlens_q.contiguous()
    bound = None if offsets is None else most_tokens(step.max_seqlen_q, q.shape[0])
    return Ends(offsets, None, bound, step.max_pages * page_size, table, step.seq_lens.contiguous())


def _without_keys(ends: Ends, sinks: Tensor | None, out: Tensor, lse: Tensor | None) -> None:
    """The result of a call without keys."""
    keep_tail(out, torch.zeros_like(out), ends)
    if lse is not None:
        if sinks is None:
            lse.fill_(-torch.inf)
        else:
            lse.copy_(sinks[:, None].expand_as(lse))


def _with_sinks(lse: Tensor, sinks: Tensor, ends: Ends, out: Tensor) -> Tensor:
    """Work sinks into a result made without; the new LSE."""
    column = sinks.float()[:, None]
    kept = torch.sigmoid(lse - column).transpose(-1, -2)  # [B, S, H] or [T, H]
    if ends.cu_seqlens_q is None:
        out.mul_(kept.unsqueeze(-1))
    else:
        keep_tail(out, (out * kept.unsqueeze(-1)).to(out.dtype), ends)
    return torch.logaddexp(lse, column)
