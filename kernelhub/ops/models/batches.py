"""The sequences of a call of serving, from a problem class and a number of new tokens. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.hub import HUB
from kernelhub.ops.attention.problem import FEW, FEW_TOKENS, LONG, LONG_TOKENS, MANY, ONE
from kernelhub.ops.gemm.fp4.problem import rows_of as _rows_of_fp4
from kernelhub.ops.gemm.fp8.problem import rows_of as _rows_of_fp8
from kernelhub.ops.indexer.problem import MOST_FEW as _MOST_FEW_LOGITS
from kernelhub.ops.models.problems import PHASES, Need
from kernelhub.ops.moe.experts.problem import MOST_FEW as _MOST_FEW_TOKENS

QUERIES = 4  # of a sequence of speculative decode, and of others with few
_MOST_DECODED = 256  # tokens of a mixed batch that are decoded
_MOST_FEW_ROWS = 64  # as of `grouped_gemm`
_ROWS_OF = {"fp4_gemm": _rows_of_fp4, "fp8_gemm": _rows_of_fp8}
_MOST_FEW = {"fused_moe": _MOST_FEW_TOKENS, "topk_indices": _MOST_FEW_LOGITS}
_MOST_SEQUENCES = 1024  # of a step, of whose numbers `every_size` makes calls
_SHORTEST = 128  # a bound of lengths below which kernels compile nothing of their own


@dataclass(frozen=True)
class Batch:
    """The sequences of one engine step.

    Attributes:
        q_lens: new tokens of each sequence.
        kv_lens: tokens of each sequence, the new ones among them.
        max_kv_len: the longest that a sequence may become, which is what block tables have room for.
        max_q_len: what a ragged call says of its longest sequence; None if it says nothing.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    max_kv_len: int
    max_q_len: int | None = None

    @property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(self.q_lens)

    @property
    def num_seqs(self) -> int:
        return len(self.q_lens)


def counts_of(need: Need, tokens: Sequence[int]) -> tuple[int, ...]:
    """Those numbers of new tokens that the class has calls of, for at least one kind of its sizes."""
    problem, kinds = need.problem("cpu"), [dict(sizes) for sizes in need.sizes or ((),)]
    return tuple(
        n for n in tokens if any(batch_of(need.op, problem, kind, n, n, n, None) is not None for kind in kinds)
    )


def need_of(op: str, problem: Any) -> Need:
    """The need of a problem of an op, in every phase, with the usual sizes where no facet gives them."""
    facets = HUB.record(op).schema.facets
    said = tuple(sorted((name, getattr(problem, name)) for name in facets if name != "device"))
    return Need(op, said, PHASES, ())


def batch_of(
    op: str, problem: Any, sizes: Mapping[str, int], tokens: int, context_len: int, longest: int, sequences: int | None
) -> Batch | None:
    """The sequences of a call with so many new tokens; None if the class has no such call."""
    if tokens < _least_rows(op, problem) or not _has_rows(op, problem, tokens):
        return None
    q_len = getattr(problem, "q_len", None)
    max_q_len: int | None = None
    several = min(tokens, sequences or -(-tokens // max(context_len, 1)))
    if q_len == ONE or op == "paged_mqa_logits" or (op == "topk_indices" and not problem.row_starts):
        q_lens, max_q_len = (1,) * tokens, 1
    elif q_len == FEW:
        queries = min(sizes.get("queries", QUERIES), FEW_TOKENS)
        q_lens, max_q_len = (queries,) * (tokens // queries), queries
        if not q_lens and problem.ragged:
            q_lens = (tokens,)
        if not q_lens:
            return None
    elif q_len == MANY or (q_len is None and op in _OF_SEQUENCES):
        q_lens = _shared_out(tokens, several)
        max_q_len = max(FEW_TOKENS + 1, *q_lens)
        if not getattr(problem, "ragged", True):
            least = 2 if op == "linear_attention" else FEW_TOKENS + 1
            if tokens < least:
                return None
            if getattr(problem, "length", None) == LONG:
                least = LONG_TOKENS
            elif op == "attention":
                several = max(several, tokens // LONG_TOKENS + 1)
            several = min(several, tokens // least)
            if not several:
                return None
            q_lens = (tokens // several,) * several
    elif q_len is not None:
        decoded = min(tokens // 2, _MOST_DECODED)
        q_lens = (*(1,) * decoded, tokens - decoded)
    else:
        q_lens = (tokens,)
    fresh = op in ("attention", "linear_attention") and q_len not in (ONE, FEW)
    kv_lens = tuple(length if fresh else max(length, context_len) for length in q_lens)
    return Batch(q_lens, kv_lens, max(longest, *kv_lens), max_q_len)


_OF_SEQUENCES = ("mqa_logits", "topk_indices", "merge_attention_states")


def batches_of_every_size(tokens: int, says: bool, context_len: int, longest: int) -> Iterator[Batch]:
    """Batches of up to so many new tokens, one for each number of sequences and longest sequence in powers of two.

    A call that does not say (`says`) how long its longest sequence is has that bound by the number of its tokens.
    """
    sequences = 1
    while sequences <= min(tokens, _MOST_SEQUENCES):
        length = _SHORTEST
        while length < 2 * max(tokens, _SHORTEST):
            if says or sequences <= length:
                q_lens = _shared_out(min(tokens, sequences * length if says else length), sequences)
                yield Batch(q_lens, q_lens, max(longest, context_len, *q_lens), length if says else None)
            length *= 2
        sequences *= 2


def _least_rows(op: str, problem: Any) -> int:
    """The least rows of a call of the class: a scale for each row is, of one row, one for the tensor or for a group."""
    of_rows = op == "dequantize_fp8" and problem.granularity in ("token", "block")
    return 2 if of_rows or (op == "grouped_gemm" and problem.a_scale == "token") else 1


def _has_rows(op: str, problem: Any, tokens: int) -> bool:
    """Whether so many rows are those that a class of few, of some or of many means."""
    rows = getattr(problem, "rows", None)
    if op in _ROWS_OF:
        return _ROWS_OF[op](tokens) == rows
    if rows not in (FEW, MANY):  # moe_combine's rows say which tokens were received
        return True
    most = _MOST_FEW.get(op, _MOST_FEW_ROWS)
    if op == "grouped_gemm":
        most *= problem.num_groups
    return bool((tokens <= most) == (rows == FEW))


def _shared_out(tokens: int, sequences: int) -> tuple[int, ...]:
    """So many tokens in sequences that are as equal as can be."""
    return tuple(tokens * (place + 1) // sequences - tokens * place // sequences for place in range(sequences))
