# mypy: ignore-errors
"""Device code around the library's exchange: what it sends, where received rows belong, and what it adds up.

    choices, before a dispatch:  the ranks that need each token; its number, ids and weights, which travel with it
    places, after a dispatch:    each row to the place of its token, with ids and weights as those of this rank
    sums, before a combine:      the sum of each received token over the experts here; where each own one is read

Grids have a program for each row that can come, of which there are at least as many as own tokens. No program reads
what another one of the same launch writes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.shared.expert_rows import (
    copy_words,
    is_needed,
    own_choices,
    sum_here,
    words_at,
    write_choices,
)


@triton.jit(do_not_specialize=["tokens"])
def choices_kernel(
    topk_ids,
    topk_weights,
    selected,
    choices,
    local_ids,
    local_weights,
    counts,
    tokens,
    TOP_K: tl.constexpr,
    WORDS: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    LOCAL: tl.constexpr,
    LANES: tl.constexpr,
):
    """Program r: own token r, if there is one, and row r of the results, which gets no expert.

    topk_ids and topk_weights [tokens, TOP_K]; selected [tokens, WORLD], ranks that need a token, others replaced by
    one of them; choices [tokens, WORDS], number, ids, bits of weights and zeros. local_ids and local_weights
    [programs, TOP_K]; counts [LOCAL]. A token that no rank needs goes to its own, which finds no expert in its ids.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    choice = lane < TOP_K
    tl.store(local_ids + row * TOP_K + lane, tl.full([LANES], -1, tl.int32), choice)
    tl.store(local_weights + row * TOP_K + lane, tl.zeros([LANES], tl.float32), choice)
    if row == 0:
        for start in range(0, LOCAL, LANES):
            tl.store(counts + start + lane, tl.zeros([LANES], tl.int32), start + lane < LOCAL)
    if row < tokens:
        ids, weights = own_choices(topk_ids, topk_weights, row, tokens, lane, TOP_K)
        some = RANK
        for peer in tl.static_range(WORLD):
            some = tl.where(is_needed(ids, choice, peer * LOCAL, LOCAL), peer, some)
        for peer in tl.static_range(WORLD):
            needed = is_needed(ids, choice, peer * LOCAL, LOCAL)
            tl.store(selected + row * WORLD + peer, tl.where(needed, peer, some))
        sent = choices + row * WORDS
        tl.store(sent, row.to(tl.int32))
        tl.store(sent + 1 + lane, ids, choice)
        tl.store(sent + 1 + TOP_K + lane, weights, choice)
        tl.store(sent + 1 + 2 * TOP_K + lane, tl.zeros([LANES], tl.int32), lane < WORDS - 1 - 2 * TOP_K)


@triton.jit(do_not_specialize=["most"], do_not_specialize_on_alignment=["came"])
def places_of_rows_kernel(
    choices,
    x,
    scales,
    came,
    made_x,
    made_scales,
    local_ids,
    local_weights,
    counts,
    most,
    TOP_K: tl.constexpr,
    WORDS: tl.constexpr,
    X_WORDS: tl.constexpr,
    SCALES: tl.constexpr,
    RANK: tl.constexpr,
    LOCAL: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Program s: slot s of the received rows, if it is filled; slots hold rows of earlier calls otherwise.

    choices [WORLD * most, WORDS], x and scales are as they came, `most` slots of each rank; came [WORLD], how many are
    filled. Results [WORLD * most, ...], of which rows that came are written.
    """
    slot = tl.program_id(0).to(tl.int64)
    sender = slot // most
    lane = tl.arange(0, NARROW)
    choice = lane < TOP_K
    if slot - sender * most < tl.load(came + sender):
        at = choices + slot * WORDS
        into = sender * most + tl.load(at)
        ids = tl.load(at + 1 + lane, choice, other=-1)
        weights = tl.load(at + 1 + TOP_K + lane, choice, other=0)
        write_choices(ids, weights, into, lane, local_ids, local_weights, counts, TOP_K, RANK, LOCAL, COUNTED)
        if is_needed(ids, choice, RANK * LOCAL, LOCAL):
            copy_words(words_at(x) + slot * X_WORDS, words_at(made_x) + into * X_WORDS, X_WORDS, BLOCK)
            if SCALES > 0:
                copy_words(words_at(scales) + slot * SCALES, words_at(made_scales) + into * SCALES, SCALES, NARROW)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["ranks", "numbers"])
def sums_kernel(
    y,
    places,
    weights,
    topk_ids,
    sums,
    ranks,
    numbers,
    tokens,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    LOCAL: tl.constexpr,
    WORLD: tl.constexpr,
    SUMMED: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Program r: the sum of received token r, if an expert of it is here, and where sums of own token r are read.

    y, places and weights are as of `sum_here`; topk_ids [tokens, TOP_K]; sums [programs, H]; ranks and numbers
    [tokens, WORLD], -1 for a rank without a sum.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    choice = lane < TOP_K
    if row < tokens:
        ids = tl.load(topk_ids + row * TOP_K + lane, choice, other=-1)
        for peer in tl.static_range(WORLD):
            needed = is_needed(ids, choice, peer * LOCAL, LOCAL)
            tl.store(ranks + row * WORLD + peer, tl.where(needed, peer, -1))
            tl.store(numbers + row * WORLD + peer, tl.where(needed, row, -1).to(tl.int32))
    if tl.max(tl.load(places + row * TOP_K + lane, choice, other=-1), 0) >= 0:
        for start in range(0, H, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total = sum_here(y, places, weights, row, at, H, TOP_K, SUMMED)
            tl.store(sums + row * H + at, total.to(sums.dtype.element_ty), at < H)
