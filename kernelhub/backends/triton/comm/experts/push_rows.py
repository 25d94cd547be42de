# mypy: ignore-errors
"""Dispatch: every rank stores its tokens in the slots of the ranks that need them, and takes those sent to it.

    for each own row, padding too: send ids and weights to every rank
                                   send the row and its scales to each rank that owns one of its experts
    for each row of each rank:     take ids and weights; write them as those of this rank
                                   if an expert is here: take the row and its scales

Sender and receiver decide by the same ids whether a row is sent, so every word that is sent is taken in the same call,
and the slots are empty again at its end. Rows that are not sent cross no link.

Every rank sends ids to every rank in each call, which is what `slots.py` needs before a set is used again. Program p
sends row i + `ahead` before it waits for row i, and waits only for programs p of the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.shared.expert_rows import copy_words, is_needed, own_choices, words_at, write_choices
from kernelhub.backends.triton.comm.experts.words import filled, send_words, slot_on, take_words
from kernelhub.backends.triton.comm.slots import deadline, end, take


@triton.jit(do_not_specialize=["tokens", "begin", "rows", "most", "apart", "capacity", "ahead", "limit_us"])
def push_rows_kernel(
    x,
    scales,
    topk_ids,
    topk_weights,
    received_x,
    received_scales,
    local_ids,
    local_weights,
    counts,
    added,
    counters,
    missing,
    slots0,
    slots1,
    slots2,
    slots3,
    slots4,
    slots5,
    slots6,
    slots7,
    tokens,
    begin,
    rows,
    most,
    apart,
    capacity,
    ahead,
    limit_us,
    X_WORDS: tl.constexpr,
    SCALES: tl.constexpr,
    TOP_K: tl.constexpr,
    LOCAL: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    MOST: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """Rows `begin` to `begin + rows` of every rank, of which this one has `tokens`, and each at most `most`.

    Rows of x and received_x, [tokens, H] and [WORLD * most, H], are X_WORDS words; scales [tokens, SCALES] are not read
    if SCALES is 0; ids and weights [tokens, TOP_K], local ones [WORLD * most, TOP_K]. LOCAL experts are on a rank;
    counts [LOCAL] gets how often each id came if COUNTED, else zeros. Ids are added in `added`: that is counts, which
    begins as zeros, or with `apart` [LOCAL + 1] words that are zero between calls, of which the program that ends last
    copies the first to counts; it is found by the last word. A slot has, for each row, units of 16 bytes with
    2 * TOP_K words of ids and weights, with x, and with scales. Arguments of the group are as in `one_shot_kernel`.
    """
    slots = (slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    head: tl.constexpr = (2 * TOP_K + 3) // 4 * 4
    record: tl.constexpr = head + X_WORDS + (SCALES + 3) // 4 * 4
    parity = tl.load(counters + tl.program_id(0))
    until = deadline(limit_us, CLOCK)
    late = tl.zeros([], tl.int32)
    step = tl.num_programs(0)
    first = tl.program_id(0)
    lane = tl.arange(0, NARROW)
    choice = lane < TOP_K
    x, received_x = words_at(x), words_at(received_x)
    scales, received_scales = words_at(scales), words_at(received_scales)
    if parity >= 0:
        sender = capacity.to(tl.int64) * 16
        here = parity * (WORLD - 1) * sender
        for sending in range(first, rows + ahead * step, step):
            receiving = sending - ahead * step
            if sending < rows:
                row = (begin + sending).to(tl.int64)
                ids, weights = own_choices(topk_ids, topk_weights, row, tokens, lane, TOP_K)
                for other in range(WORLD - 1):
                    peer = tl.where(other < RANK, other, other + 1)
                    slot = words_at(slot_on(slots, peer, here, sender, RANK, WORLD)) + sending * record
                    tl.store(slot + lane, filled(ids), choice)
                    tl.store(slot + TOP_K + lane, filled(weights), choice)
                    if is_needed(ids, choice, peer * LOCAL, LOCAL):
                        send_words(x + row * X_WORDS, slot + head, X_WORDS, BLOCK)
                        if SCALES > 0:
                            send_words(scales + row * SCALES, slot + head + X_WORDS, SCALES, NARROW)
            if receiving >= 0:
                row = (begin + receiving).to(tl.int64)
                ids, weights = own_choices(topk_ids, topk_weights, row, tokens, lane, TOP_K)
                into = RANK * most.to(tl.int64) + row
                write_choices(ids, weights, into, lane, local_ids, local_weights, added, TOP_K, RANK, LOCAL, COUNTED)
                if is_needed(ids, choice, RANK * LOCAL, LOCAL):
                    copy_words(x + row * X_WORDS, received_x + into * X_WORDS, X_WORDS, BLOCK)
                    if SCALES > 0:
                        copy_words(scales + row * SCALES, received_scales + into * SCALES, SCALES, NARROW)
                for other in range(WORLD - 1):
                    peer = tl.where(other < RANK, other, other + 1)
                    slot = words_at(slots[RANK] + here + other * sender) + receiving * record
                    ids, late = take(slot + lane, choice, missing, peer, until, late, CLOCK)
                    weights, late = take(slot + TOP_K + lane, choice, missing, peer, until, late, CLOCK)
                    into = peer * most.to(tl.int64) + row
                    write_choices(
                        ids, weights, into, lane, local_ids, local_weights, added, TOP_K, RANK, LOCAL, COUNTED
                    )
                    if is_needed(ids, choice, RANK * LOCAL, LOCAL):
                        target = received_x + into * X_WORDS
                        late = take_words(slot + head, target, missing, peer, until, late, X_WORDS, BLOCK, CLOCK)
                        if SCALES > 0:
                            slot += head + X_WORDS
                            target = received_scales + into * SCALES
                            late = take_words(slot, target, missing, peer, until, late, SCALES, NARROW, CLOCK)
    else:
        for receiving in range(first, rows, step):
            for peer in tl.static_range(WORLD):
                into = peer * most.to(tl.int64) + begin + receiving
                tl.store(local_ids + into * TOP_K + lane, tl.full([NARROW], -1, tl.int32), choice)
                tl.store(local_weights + into * TOP_K + lane, tl.zeros([NARROW], tl.float32), choice)
    if COUNTED:
        if apart > 0:
            tl.debug_barrier()  # all threads have added their ids
            if tl.atomic_add(added + LOCAL, 1, sem="acq_rel", scope="gpu") == step - 1:
                tl.store(added + LOCAL, 0)
                if begin + rows >= most:  # no further launch of this call adds ids
                    for start in range(0, LOCAL, NARROW):
                        at = start + lane
                        found = tl.load(added + at, at < LOCAL, other=0, volatile=True)
                        tl.store(counts + at, found, at < LOCAL)
                        tl.store(added + at, tl.zeros([NARROW], tl.int32), at < LOCAL)
    elif first == 0:
        for start in range(0, LOCAL, NARROW):
            tl.store(counts + start + lane, tl.zeros([NARROW], tl.int32), start + lane < LOCAL)
    end(counters, parity, late, MOST)
