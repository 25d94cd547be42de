# mypy: ignore-errors
"""Which program of the split-KV kernel reads which keys, where the lengths of a batch share the work out.

The host has a bound on the lengths only. Of a large batch it gives each sequence one part, and the longest decides
the time. So every program computes from the lengths, which are on the device, how many keys a part has:

    lengths nearly equal: those of the host's rule, one part of fewer keys than `least`, else `splits` of the longest,
        but of CHUNK keys each, if `filled` programs have such parts
    otherwise: all keys of the batch over `shares`, but no less than CHUNK

A sequence has as many whole parts as fit before its last one, which takes the rest. The grid is a list of items, each
for every KV head: first the whole parts of all sequences, found by a scan of their numbers, then the last part of each
sequence. So programs of about equal work come first and short ones fill the gaps at the end; programs that have no item
are the last of the grid, and they are few: `shares` bounds the number of whole parts of unequal lengths. There is no
other bound on the parts of a sequence. Parts of equal lengths stand sequence by sequence, which needs no scan.

A persistent grid, whose programs walk equal stretches of all keys (`gluon/mla/schedule.py`), has no empty programs.
But its cuts fall into sequences of equal lengths, too, which then have to be merged, and the loop around the one over
keys takes registers. On an H200 such a grid took 0.90 and 0.93 of the time for 256 and 64 bfloat16 sequences of
ShareGPT-like lengths, but 1.04 to 1.30 for 8, 32 and 128, with fp8 keys 1.09 to 1.30 for all of these and up to 1.25
for equal lengths (benchmarks/results/splits_persistent_h200.json). Here equal lengths have
the parts that they have without this.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.attention.softmax import key_range, sequence_bounds

# Each warp reads all lengths: sums over its 32 lanes need neither shared memory nor a barrier. READS reads of it are
# under way at once.
LANES = tl.constexpr(32)
READS = tl.constexpr(8)


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
def over_lengths(
    visit: tl.constexpr, given, state, until, num_seqs, batch, GROUP: tl.constexpr, RAGGED: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """The state after `visit(given, state, blocks, first, ONCE)` of LANES sequences at once, `first` and on, in turn.

    It may leave out those from `until` on. ONCE: this visit is the only one, and what it gives needs no state before.
    """
    if num_seqs <= LANES:
        blocks = blocks_of(tl.arange(0, LANES), num_seqs, *batch, GROUP, RAGGED, PAGE, BLOCK_N, HAS_LEFT, HAS_RIGHT)
        state = visit(given, state, blocks, 0, True)
    else:
        for start in tl.range(0, until, LANES * READS, num_stages=1):
            for read in tl.static_range(READS):
                first = start + read * LANES
                places = first + tl.arange(0, LANES)
                blocks = blocks_of(places, num_seqs, *batch, GROUP, RAGGED, PAGE, BLOCK_N, HAS_LEFT, HAS_RIGHT)
                state = visit(given, state, blocks, first, False)
    return state


@triton.jit
def add_blocks(given, state, blocks, first, ONCE: tl.constexpr):
    """Of each lane (blocks, most blocks of a sequence)."""
    totals, longest = state
    totals += blocks
    if ONCE:
        longest = blocks
    else:
        longest = tl.maximum(longest, blocks)
    return totals, longest


@triton.jit
def part_size(
    num_seqs,
    splits,
    shares,
    filled,
    least,
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
    """(blocks of a whole part, blocks by which a last part may exceed it, parts of each sequence; 0 if they differ)."""
    batch = (cu_seqlens_q, cu_seqlens_k, seq_lens, q_tokens, kv_tokens, max_rows, window_left, window_right)
    nothing = tl.zeros([LANES], tl.int32)
    totals, longest = over_lengths(
        add_blocks, (0,), (nothing, nothing), num_seqs, num_seqs, batch, GROUP, RAGGED, PAGE, BLOCK_N, HAS_LEFT,
        HAS_RIGHT,
    )  # fmt: skip
    total = tl.sum(totals, 0)
    most = tl.max(longest, 0)
    # One division: what is divided is selected first.
    short = most * BLOCK_N < least
    wanted = tl.where(short, 1, tl.maximum(tl.minimum(tl.cdiv(most * BLOCK_N, CHUNK), splits), 1))
    alike = most.to(tl.float32) * num_seqs * 8.0 <= (total + num_seqs).to(tl.float32) * 9.0
    alike = alike & (short | (num_seqs * wanted >= filled))
    each = tl.cdiv(tl.where(alike, most, total), tl.where(alike, wanted, shares))
    each = tl.maximum(each, tl.where(alike, 1, (CHUNK + BLOCK_N - 1) // BLOCK_N))
    slack = tl.where(alike, 0, (each + 2) // 4)
    return each, slack, tl.where(alike, wanted, (most <= each + slack).to(tl.int32))


@triton.jit
def blocks_of_part(blocks, each, limit):
    """Blocks of a whole part of a sequence, which has 2^limit parts at most."""
    return tl.maximum(each, (blocks >> limit) + ((blocks & ((1 << limit) - 1)) > 0).to(tl.int32))


@triton.jit
def parts_before_last(blocks, each, slack, limit):
    """Whole parts of a sequence before its last one."""
    return tl.maximum(tl.cdiv(blocks - slack, blocks_of_part(blocks, each, limit)) - 1, 0)


@triton.jit
def find_item(given, state, blocks, first, ONCE: tl.constexpr):
    """(whole parts so far, of those before the sequences that hold the item, the first of these, their whole parts)."""
    item, each, slack, limit = given
    before, reached, holding, held = state
    whole = parts_before_last(blocks, each, slack, limit)
    number = tl.sum(whole, 0)
    if ONCE:
        held = whole
    else:
        here = (item >= before) & (item < before + number)
        held = tl.where(here, whole, held)
        holding = tl.where(here, first, holding)
        reached = tl.where(here, before, reached)
    return before + number, reached, holding, held


@triton.jit
def item_of(
    item,
    each,
    slack,
    wanted,
    limit,
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
    sequence = item // tl.maximum(wanted, 1)
    part = item - sequence * wanted
    before = 0  # whole parts
    reached = 0  # of those, how many before the sequences that hold the item
    first = 0  # of these sequences
    held = tl.zeros([LANES], tl.int32)  # their whole parts
    batch = (cu_seqlens_q, cu_seqlens_k, seq_lens, q_tokens, kv_tokens, max_rows, window_left, window_right)
    if wanted == 0:
        before, reached, first, held = over_lengths(
            find_item, (item, each, slack, limit), (before, reached, first, held), num_seqs, num_seqs, batch, GROUP,
            RAGGED, PAGE, BLOCK_N, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
    if wanted == 0:
        sequence = item - before
        part = -1
    if item < before:
        passed = reached + tl.cumsum(held, 0) <= item
        sequence = first + tl.sum(passed.to(tl.int32), 0)
        part = item - reached - tl.sum(tl.where(passed, held, 0), 0)
    return sequence, part


@triton.jit
def add_stored(given, state, blocks, first, ONCE: tl.constexpr):
    """Parts that are stored of each lane's sequences before one."""
    sequence, each, slack, limit = given
    whole = parts_before_last(blocks, each, slack, limit)
    places = first + tl.arange(0, LANES)
    return (state[0] + tl.where((places < sequence) & (whole > 0), whole + 1, 0),)


@triton.jit
def stored_before(
    sequence,
    each,
    slack,
    wanted,
    limit,
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
    batch = (cu_seqlens_q, cu_seqlens_k, seq_lens, q_tokens, kv_tokens, max_rows, window_left, window_right)
    before = sequence * wanted
    if wanted == 0:
        (stored,) = over_lengths(
            add_stored, (sequence, each, slack, limit), (tl.zeros([LANES], tl.int32),), sequence, num_seqs, batch,
            GROUP, RAGGED, PAGE, BLOCK_N, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        before = tl.sum(stored, 0)
    return before
