# mypy: ignore-errors
"""Pairs of a token and a choice, sorted by expert on the device, each expert's padded to whole tiles.

    count (`count_kernel` of `pairs.py`): for each piece of the pairs, how many each expert has in it
    sort: a pair's row = rows of experts before its own, its expert's pairs in pieces before, and in its piece before it

No program waits for another and none adds to what another wrote, so the order is the same every time. A pair is a
number, token * TOP_K + rank; the number of pairs, which is no pair, pads a tile. The number of rows, which is not on
the host, is written to `num_rows`, and grids are sized for the maximum.

Few pairs are sorted by few programs. Further programs of the launch bring the tokens into the form that the first
product reads, which spares a launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.shared.pairs import counts_of, experts_of, ranks_in_piece
from kernelhub.backends.triton.fp4 import store_planes
from kernelhub.backends.triton.moe.quantize import quantize_pieces

_VARYING = ["pairs", "pieces", "num_global", "stride_it", "stride_ik", "stride_em", "tokens"]
# Results of the sort share one allocation, each beginning where the one before ends.
_METADATA = ["topk_ids", "expert_map", "counts", "sorted_pairs", "tile_experts", "num_rows", "x_scale"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_METADATA)
def sort_kernel(
    topk_ids,
    expert_map,
    counts,
    sorted_pairs,
    tile_experts,
    num_rows,
    x,
    x_scale,
    formed,
    scales,
    pairs,
    pieces,
    num_global,
    stride_it,
    stride_ik,
    stride_em,
    tokens,
    stride_xm,
    stride_xk,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    STATIC: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program per piece, then those that form tokens: FORM is "" (none), "codes" or "planes"."""
    if tl.program_id(0) < pieces:
        _sort(
            topk_ids, expert_map, counts, sorted_pairs, tile_experts, num_rows, pairs, pieces, num_global, stride_it,
            stride_ik, stride_em, TOP_K, EXPERTS, EXPERTS_PAD, HAS_MAP, HAS_COUNTS, BLOCK_M, PIECE, BLOCK,
        )  # fmt: skip
    else:
        program = tl.program_id(0) - pieces
        if FORM == "codes":
            quantize_pieces(
                program, x, x_scale, formed, scales, tokens, stride_xm, stride_xk, K, WIDTH, WIDTH_PAD, STATIC, ROWS
            )
        elif FORM == "planes":
            store_planes(program, x, None, formed, tokens, tokens, 0, stride_xm, stride_xk, K, False, ROWS, WIDTH)


@triton.jit
def _sort(
    topk_ids, expert_map, counts, sorted_pairs, tile_experts, num_rows, pairs, pieces, num_global, stride_it, stride_ik,
    stride_em, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, HAS_MAP: tl.constexpr,
    HAS_COUNTS: tl.constexpr, BLOCK_M: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A piece. Without counts each program counts for itself, BLOCK pairs at once, which spares few a launch."""
    own = tl.program_id(0)
    expert = tl.arange(0, EXPERTS_PAD)
    total, before = counts_of(
        topk_ids, expert_map, counts, pairs, pieces, num_global, stride_it, stride_ik, stride_em, TOP_K, EXPERTS,
        EXPERTS_PAD, HAS_MAP, HAS_COUNTS, PIECE, BLOCK,
    )  # fmt: skip
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    tile = tl.cumsum(tiles, 0) - tiles
    pair = own * PIECE + tl.arange(0, PIECE)
    mine = experts_of(
        topk_ids, expert_map, pair, pairs, num_global, stride_it, stride_ik, stride_em, TOP_K, EXPERTS, HAS_MAP
    )
    rank = ranks_in_piece(pair, mine)
    row = tl.gather(tile * BLOCK_M + before, tl.minimum(mine, EXPERTS_PAD - 1), 0) + rank
    tl.store(sorted_pairs + row, pair, mine < EXPERTS)
    # What is left of tiles and of the list of tiles is shared out among programs.
    end = tile * BLOCK_M + total
    for rest in range(own, BLOCK_M, pieces):
        tl.store(sorted_pairs + end + rest, pairs + tl.zeros_like(end), rest < tiles * BLOCK_M - total)
    for further in range(own, tl.max(tiles, 0), pieces):
        tl.store(tile_experts + tile + further, expert, further < tiles)
    if own == 0:
        tl.store(num_rows, tl.sum(tiles, 0) * BLOCK_M)
