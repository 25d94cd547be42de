# mypy: ignore-errors
"""Which program of the split-KV kernel reads which keys, where the lengths of a batch share the work out.

The host has a bound on the lengths only. Of a large batch it gives each sequence one part, and the longest decides
the time. So every program computes from the lengths, which are on the device, how many keys a part has:

    lengths nearly equal: those of the host's rule, `splits` parts of the longest
    otherwise: all keys of the batch over `shares`, but no less than CHUNK

A sequence has as many whole parts as fit before its last one, which takes the rest. The grid is a list of items, each
for every KV head: first the whole parts of all sequences, found by a scan of their numbers, then the last part of each
sequence. So programs of about equal work come first and short ones fill the gaps at the end; programs that have no item
are the last of the grid, and they are few: `shares` bounds the number of whole parts of unequal lengths. There is no
other bound on the parts of a sequence.

A persistent grid, whose programs walk equal stretches of all keys (`gluon/mla/schedule.py`), has no empty programs.
But its cuts fall into sequences of equal lengths, too, which then have to be merged, and it needs the number of
programs that run at once. Here equal lengths have the parts that they have without this.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.attention.softmax import key_range, sequence_bounds

LANES = tl.constexpr(256)  # sequences at a time


@triton.jit
def blocks_of(
    sequence,
    num_seqs,
    cu_seqlens_q,
    cu_seqlens_k,
    seq_lens,
    q_tokens,
    kv_tokens,
    max_rows,
    window_left,
    window_right,
    GROUP: tl.constexpr,
    RAGGED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Blocks of keys that some sequences see; 0 past the last one, and of those that are left to the prefill kernel."""
    _, q_len, _, kv_len = sequence_bounds(
        tl.minimum(sequence, num_seqs - 1), cu_seqlens_q, cu_seqlens_k, seq_lens, q_tokens, kv_tokens, RAGGED, PAGE
    )
    low, high = key_range(0, q_len - 1, q_len, kv_len, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_N)
    here = (sequence < num_seqs) & (q_len > 0) & (q_len * GROUP <= max_rows)
    return tl.where(here, tl.cdiv(high - low, BLOCK_N), 0).to(tl.int32)


@triton.jit
def part_size(
    num_seqs,
    splits,
    shares,
    cu_seqlens_q,
    cu_seqlens_k,
    seq_lens,
    q_tokens,
    kv_tokens,
    max_rows,
    window_left,
    window_right,
    GROUP: tl.constexpr,
    RAGGED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """(blocks of a whole part, blocks by which a last part may exceed it)."""
    total = 0
    longest = 0
    for start in tl.range(0, num_seqs, LANES, num_stages=1):
        blocks = blocks_of(
            start + tl.arange(0, LANES), num_seqs, cu_seqlens_q, cu_seqlens_k, seq_lens, q_tokens, kv_tokens, max_rows,
            window_left, window_right, GROUP, RAGGED, PAGE, BLOCK_N, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        total += tl.sum(blocks, 0)
        longest = tl.maximum(longest, tl.max(blocks, 0))
    wanted = tl.maximum(tl.minimum(tl.cdiv(longest * BLOCK_N, CHUNK), splits), 1)
    alike = longest * 8 <= tl.cdiv(total, num_seqs) * 9
    shared = tl.maximum(tl.cdiv(total, shares), tl.cdiv(CHUNK, BLOCK_N))
    each = tl.where(alike, tl.maximum(tl.cdiv(longest, wanted), 1), shared)
    return each, tl.where(alike, 0, each // 4)


@triton.jit
def blocks_of_part(blocks, each, most):
    """Blocks of a whole part of a sequence, which has `most` parts at most."""
    return tl.maximum(each, tl.cdiv(blocks, most))


@triton.jit
def parts_before_last(blocks, each, slack, most):
    """Whole parts of a sequence before its last one."""
    return tl.maximum(tl.cdiv(blocks - slack, blocks_of_part(blocks, each, most)) - 1, 0)


@triton.jit
def item_of(
    item,
    each,
    slack,
    most,
    num_seqs,
    cu_seqlens_q,
    cu_seqlens_k,
    seq_lens,
    q_tokens,
    kv_tokens,
    max_rows,
    window_left,
    window_right,
    GROUP: tl.constexpr,
    RAGGED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """(sequence, part) of an item; the part is -1 for the last one; the sequence is `num_seqs` or more for no item."""
    before = 0
    sequence = 0
    first = 0
    for start in tl.range(0, num_seqs, LANES, num_stages=1):
        places = start + tl.arange(0, LANES)
        blocks = blocks_of(
            places, num_seqs, cu_seqlens_q, cu_seqlens_k, seq_lens, q_tokens, kv_tokens, max_rows,
            window_left, window_right, GROUP, RAGGED, PAGE, BLOCK_N, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        whole = parts_before_last(blocks, each, slack, most)
        number = tl.sum(whole, 0)
        if (item >= before) & (item < before + number):
            passed = before + tl.cumsum(whole, 0) <= item
            sequence = start + tl.sum(passed.to(tl.int32), 0)
            first = before + tl.sum(tl.where(passed, whole, 0), 0)
        before += number
    is_last = item >= before
    return tl.where(is_last, item - before, sequence), tl.where(is_last, -1, item - first)


@triton.jit
def stored_before(
    sequence,
    each,
    slack,
    most,
    num_seqs,
    cu_seqlens_q,
    cu_seqlens_k,
    seq_lens,
    q_tokens,
    kv_tokens,
    max_rows,
    window_left,
    window_right,
    GROUP: tl.constexpr,
    RAGGED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Parts that are stored of the sequences before one: all of those that have more than one."""
    stored = 0
    for start in tl.range(0, sequence, LANES, num_stages=1):
        places = start + tl.arange(0, LANES)
        blocks = blocks_of(
            places, num_seqs, cu_seqlens_q, cu_seqlens_k, seq_lens, q_tokens, kv_tokens, max_rows,
            window_left, window_right, GROUP, RAGGED, PAGE, BLOCK_N, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        whole = parts_before_last(blocks, each, slack, most)
        stored += tl.sum(tl.where((places < sequence) & (whole > 0), whole + 1, 0), 0)
    return stored
