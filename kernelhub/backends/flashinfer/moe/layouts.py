"""The layout of experts' weights for TensorRT-LLM's kernels, and its inverse.

Rows of a product are what a thread of the epilogue holds, so they change places within 32: rows 0 to 3, 4 to 7, ...
become columns of a table, of which the rows come one after the other. Gate and up, which the epilogue joins, must be
neighbours before that: up first, then gate.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kernelhub.backends.flashinfer.gemm import operands
from kernelhub.backends.shared.scales import tiled, untiled
from kernelhub.ops.moe.experts.adapter import W13

BLOCK_BYTES = 128  # of a row that are contiguous where K is blocked


def each(move: Callable[[Tensor], Tensor], experts: Tensor) -> Tensor:
    """`move` applied to experts [E, ...] one by one; all at once would need several copies."""
    first = move(experts[:1])
    made = first.new_empty((experts.shape[0], *first.shape[1:]))
    made[0] = first[0]
    for place in range(1, experts.shape[0]):
        made[place] = move(experts[place : place + 1])[0]
    return made


def for_epilogue(side: str, rows: Tensor) -> Tensor:
    """Rows [E, N, ...] of a projection: shuffled, those of w13 with up and gate in turn."""
    return shuffled(in_turn(rows) if side == W13 else rows)


def from_epilogue(side: str, rows: Tensor) -> Tensor:
    """The inverse of `for_epilogue`."""
    straight = unshuffled(rows)
    return one_after_the_other(straight) if side == W13 else straight


def shuffled(rows: Tensor) -> Tensor:
    """Rows [E, N, ...] with each 32 in the order of the epilogue; N is a multiple of 32."""
    return operands.shuffled(rows.flatten(0, 1)).view(rows.shape)


def unshuffled(rows: Tensor) -> Tensor:
    """The inverse of `shuffled`."""
    return operands.unshuffled(rows.flatten(0, 1)).view(rows.shape)


def in_turn(rows: Tensor) -> Tensor:
    """Rows [E, 2I, ...] of gate, then of up, as up and gate in turn."""
    experts, count = rows.shape[:2]
    return rows.reshape(experts, 2, count // 2, -1).flip(1).transpose(1, 2).reshape(rows.shape)


def one_after_the_other(rows: Tensor) -> Tensor:
    """The inverse of `in_turn`."""
    experts, count = rows.shape[:2]
    return rows.reshape(experts, count // 2, 2, -1).flip(2).transpose(1, 2).reshape(rows.shape)


def in_blocks(rows: Tensor) -> Tensor:
    """Bytes [E, N, B] as [E, B / 128, N, 128]."""
    experts, count, width = rows.shape
    return rows.reshape(experts, count, width // BLOCK_BYTES, BLOCK_BYTES).transpose(1, 2).contiguous()


def out_of_blocks(blocks: Tensor) -> Tensor:
    """The inverse of `in_blocks`."""
    experts, wide, count, _ = blocks.shape
    return blocks.transpose(1, 2).reshape(experts, count, wide * BLOCK_BYTES)


def in_tiles(scale: Tensor) -> Tensor:
    """Scales [E, N, groups] in tiles of 128 rows by 4 groups; N and groups are multiples of these."""
    return tiled(scale.flatten(0, 1)).view(scale.shape)


def out_of_tiles(tiles: Tensor) -> Tensor:
    """The inverse of `in_tiles`."""
    flat = tiles.flatten(0, 1)
    return untiled(flat, *flat.shape).view(tiles.shape)
