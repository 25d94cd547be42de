# mypy: ignore-errors
"""Routing: a block of tokens per program, all their experts in registers.

    key = (what an expert is ranked by, as an integer of the same order) << 32 | (the more, the lower its id)
    top_k times: the largest key is the next expert; take it out

Experts are ordered by group, each group padded to a power of two, so that a reshape separates them. Keys of groups that
are not chosen become the lowest integer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.formats import LOG2E

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
LOWEST = tl.constexpr(-(1 << 63))


@triton.jit
def _keys(ranked, place):
    """int64 in the order of float32 values, of equals the one with the larger `place` the larger."""
    bits = tl.where(ranked == 0.0, 0.0, ranked).to(tl.int32, bitcast=True)  # -0 is 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | place.to(tl.int64)


@triton.jit
def _softmax(numbers):
    """Over the last dimension; zeros where every number is -inf."""
    top = tl.max(numbers, 1)
    parts = tl.exp2((numbers - tl.where(top == float("-inf"), 0.0, top)[:, None]) * LOG2E)
    total = tl.sum(parts, 1)
    return parts / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["tokens", "scaling_factor"], do_not_specialize_on_alignment=["correction_bias"])
def routing_kernel(
    logits,
    correction_bias,
    weights,
    ids,
    scaling_factor,
    tokens,
    stride_lt,
    stride_le,
    stride_wt,
    stride_wk,
    stride_it,
    stride_ik,
    stride_be,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    SCORING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    there = token < tokens
    column = tl.arange(0, GROUPS_PAD * SIZE_PAD)
    expert = column // SIZE_PAD * SIZE + column % SIZE_PAD
    exists = (column // SIZE_PAD < GROUPS) & (column % SIZE_PAD < SIZE)
    mask = there[:, None] & exists[None, :]
    numbers = tl.load(logits + token[:, None] * stride_lt + expert[None, :] * stride_le, mask, other=float("-inf")).to(
        tl.float32
    )
    numbers = tl.where(numbers == numbers, numbers, float("-inf"))
    numbers = tl.where(numbers > FLOAT32_MAX, FLOAT32_MAX, numbers)
    # Divided by their sum they are a softmax over the chosen, whose sum among all may be next to nothing.
    over_chosen: tl.constexpr = SCORING == "softmax_after_topk" or (SCORING == "softmax" and RENORMALIZE)
    if SCORING == "softmax" and (HAS_BIAS or not over_chosen):
        scores = _softmax(numbers)
    elif SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp2(-numbers * LOG2E))
    else:
        scores = numbers
    ranked = numbers
    if HAS_BIAS:
        ranked = scores + tl.load(correction_bias + expert * stride_be, exists, other=0.0)[None, :]
        ranked = tl.where(ranked == ranked, ranked, float("-inf"))
    last: tl.constexpr = GROUPS * SIZE - 1
    keys = tl.where(exists[None, :], _keys(ranked, last - expert[None, :]), LOWEST)

    if GROUPS > 1:
        by_group = tl.reshape(keys, (BLOCK, GROUPS_PAD, SIZE_PAD))
        values = tl.reshape(ranked, (BLOCK, GROUPS_PAD, SIZE_PAD))
        first = tl.max(by_group, 2)
        best = tl.max(tl.where(by_group == first[:, :, None], values, float("-inf")), 2)
        if HAS_BIAS and SIZE > 1:
            rest = tl.where(by_group == first[:, :, None], LOWEST, by_group)
            second = tl.max(rest, 2)
            best += tl.max(tl.where(rest == second[:, :, None], values, float("-inf")), 2)
            best = tl.where(best == best, best, float("-inf"))
        group = tl.arange(0, GROUPS_PAD)
        group_keys = tl.where((group < GROUPS)[None, :], _keys(best, GROUPS - 1 - group[None, :]), LOWEST)
        kept = tl.zeros((BLOCK, GROUPS_PAD), dtype=tl.int1)
        for _ in range(TOPK_GROUPS):
            top = tl.max(group_keys, 1)
            kept = kept | (group_keys == top[:, None])
            group_keys = tl.where(group_keys == top[:, None], LOWEST, group_keys)
        by_group = tl.where(kept[:, :, None], by_group, LOWEST)
        keys = tl.reshape(by_group, (BLOCK, GROUPS_PAD * SIZE_PAD))

    k = tl.arange(0, K_PAD)
    chosen = tl.zeros((BLOCK, K_PAD), dtype=tl.int32)
    found = tl.full((BLOCK, K_PAD), float("-inf"), dtype=tl.float32)
    for place in range(TOP_K):
        top = tl.max(keys, 1)
        is_top = keys == top[:, None]
        score = tl.max(tl.where(is_top, numbers if over_chosen else scores, float("-inf")), 1)
        expert_of = last - (top & 0xFFFFFFFF).to(tl.int32)
        chosen = tl.where((k == place)[None, :], expert_of[:, None], chosen)
        found = tl.where((k == place)[None, :], score[:, None], found)
        keys = tl.where(is_top, LOWEST, keys)
    is_choice = (k < TOP_K)[None, :]
    if over_chosen:
        found = _softmax(found)
    else:
        found = tl.where(is_choice, found, 0.0)
        if RENORMALIZE:
            found = found / (tl.sum(found, 1) + 1e-20)[:, None]
    found = found * scaling_factor
    mask = there[:, None] & is_choice
    tl.store(weights + token[:, None] * stride_wt + k[None, :] * stride_wk, found, mask)
    tl.store(ids + token[:, None] * stride_it + k[None, :] * stride_ik, chosen, mask)
