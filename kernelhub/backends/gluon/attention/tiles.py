# mypy: ignore-errors
"""Which rows a tile has, and which steps of keys they see: computed by every part of a program alike."""

from __future__ import annotations

from kernelhub.backends.gluon.language import gl, gluon

ROWS = gl.constexpr(128)  # of a tile: as many queries of a head, or as many over PACK of each of PACK heads


@gluon.jit
def within(offsets, sequence, tokens):
    """(first token, tokens) of a sequence, cut to the tokens that there are."""
    start = gl.minimum(gl.maximum(gl.load(offsets + sequence), 0), tokens)
    end = gl.minimum(gl.load(offsets + sequence + 1), tokens)
    return start, gl.maximum(end - start, 0)


@gluon.jit
def sequence_of(slot, cu_seqlens_q, num_seqs, TOKENS: gl.constexpr):
    """The ragged sequence of a place in a row of tiles whose length depends on no offset, and its place therein.

    Sequence i is given the places from cu[i] // TOKENS + i on, which is never too few. Some have no rows.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if gl.load(cu_seqlens_q + middle) // TOKENS + middle <= slot:
            low = middle + 1
        else:
            high = middle
    sequence = gl.maximum(low - 1, 0)
    return sequence, slot - (gl.load(cu_seqlens_q + sequence) // TOKENS + sequence)


@gluon.jit
def tile_of(
    t, cu_seqlens_q, cu_seqlens_k, seq_lens, num_seqs, q_tokens, kv_tokens, HEADS: gl.constexpr, RAGGED: gl.constexpr,
    PAGE: gl.constexpr, PACK: gl.constexpr,
):  # fmt: skip
    """(first head, sequence, row block, first query, queries, first key, keys); the block is below 0 if it has no rows.

    No row is outside of the operands, whatever offsets and lengths say.
    """
    TOKENS: gl.constexpr = ROWS // PACK
    head = t % (HEADS // PACK) * PACK
    slot = t // (HEADS // PACK)
    q_start = slot * 0
    q_len = q_tokens
    if RAGGED:
        sequence, place = sequence_of(slot, cu_seqlens_q, num_seqs, TOKENS)
        q_start, q_len = within(cu_seqlens_q, sequence, q_tokens)
    else:
        sequence = slot % num_seqs
        place = slot // num_seqs
    block = (q_len + (TOKENS - 1)) // TOKENS - 1 - place
    if RAGGED:
        block = gl.where(place < 0, -1, block)
    kv_start = q_start * 0
    kv_len = kv_tokens
    if PAGE > 0:
        kv_len = gl.minimum(gl.maximum(gl.load(seq_lens + sequence), 0), kv_tokens)
    elif RAGGED:
        kv_start, kv_len = within(cu_seqlens_k, sequence, kv_tokens)
    return head, sequence, block, q_start, q_len, kv_start, kv_len


@gluon.jit
def key_steps(
    block, q_len, kv_len, window_left, window_right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, PACK: gl.constexpr,
):  # fmt: skip
    """(first key, steps, first step that all rows see, first step that a left window cuts), counted from the last keys.

    There is one step at least. It is masked where no row sees a key.
    """
    TOKENS: gl.constexpr = ROWS // PACK
    return steps_of(block * TOKENS, q_len, kv_len, window_left, window_right, TOKENS, HAS_LEFT, HAS_RIGHT, BLOCK_N)


@gluon.jit
def steps_of(
    first, q_len, kv_len, window_left, window_right, MANY: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The same for the MANY queries from `first` on."""
    offset = kv_len - q_len
    last = gl.minimum(first + MANY, q_len) - 1
    low = kv_len * 0
    high = kv_len
    seen_by_all = kv_len
    if HAS_LEFT:
        low = gl.maximum(offset + first - window_left, 0) // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        high = gl.minimum(offset + last + window_right + 1, kv_len)
        seen_by_all = gl.minimum(offset + first + window_right + 1, kv_len)
    steps = gl.maximum((high - low + (BLOCK_N - 1)) // BLOCK_N, 1)
    right = gl.minimum(gl.maximum(steps - gl.maximum(seen_by_all - low, 0) // BLOCK_N, 1), steps)
    left = steps
    if HAS_LEFT:
        cut = gl.maximum(offset + last - window_left, 0)
        left = gl.maximum(steps - gl.maximum(cut - low + (BLOCK_N - 1), 0) // BLOCK_N, right)
    return low, steps, right, left


@gluon.jit
def own_steps(
    first, low, steps, q_len, kv_len, window_left, window_right, MANY: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Of a tile's `steps` from `low` on, those of the MANY queries from `first` on.

    (steps before, first key, steps, first that all rows see, first that a left window cuts): the last four as
    `key_steps` has them. Rows that do not exist have one of the tile's steps.
    """
    of_low, of_steps, right, left = steps_of(
        first, q_len, kv_len, window_left, window_right, MANY, HAS_LEFT, HAS_RIGHT, BLOCK_N
    )
    of_low = gl.minimum(of_low, low + (steps - 1) * BLOCK_N)
    of_steps = gl.minimum(of_steps, steps - (of_low - low) // BLOCK_N)
    before = steps - of_steps - (of_low - low) // BLOCK_N
    left = gl.minimum(left, of_steps)
    return before, of_low, of_steps, gl.minimum(right, left), left
