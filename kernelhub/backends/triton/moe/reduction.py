# mypy: ignore-errors
"""What a token's experts gave, added up in the order of its choices, with what is added to the result."""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.shared.pairs import experts_of


@triton.jit(
    do_not_specialize=["pairs", "num_global", "stride_it", "stride_ik", "stride_em"],
    do_not_specialize_on_alignment=["topk_ids", "expert_map"],
)
def reduce_kernel(
    added,
    topk_ids,
    expert_map,
    residual,
    out,
    pairs,
    num_global,
    stride_it,
    stride_ik,
    stride_em,
    stride_rm,
    stride_rn,
    stride_om,
    stride_on,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A tile of one token. Rows of `added` [pairs, N] that are left out were never written, and are not read."""
    across: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    token = (tl.program_id(0) // across).to(tl.int64)
    n = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < N
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):  # so that all loads are in flight at once
        pair = token * TOP_K + choice
        expert = experts_of(
            topk_ids, expert_map, pair, pairs, num_global, stride_it, stride_ik, stride_em, TOP_K, EXPERTS, HAS_MAP
        )
        total += tl.load(added + pair * N + n, mask & (expert < EXPERTS), other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + token * stride_rm + n * stride_rn, mask, other=0.0).to(tl.float32)
    tl.store(out + token * stride_om + n * stride_on, total.to(out.dtype.element_ty), mask)
