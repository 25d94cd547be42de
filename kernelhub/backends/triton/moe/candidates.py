"""Tiles of `fused_moe` that are worth a try: what `kernelhub tune` and scripts/measure_expert_tiles.py time.

Sums of a thread must fill some registers and not spill (8 to 160 of float32), and operands in flight must fit the
shared memory of a block; compilation finds the other failures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernelhub.backends.triton.moe.tiles import default_tiles, rows_of_a_tile
from kernelhub.backends.triton.moe.tuned import Tiles
from kernelhub.ops.moe.experts.problem import BLOCK_FORMATS, FOUR_BIT_FORMATS, ExpertsProblem


def heights(problem: ExpertsProblem, num_tokens: int) -> list[int]:
    """Rows of tiles worth a try: the default's and its neighbours'."""
    block_m = rows_of_a_tile(num_tokens * problem.top_k, problem.num_experts)
    return [height for height in (block_m, block_m * 2, block_m // 2) if 16 <= height <= 128]


def candidates(problem: ExpertsProblem, block_m: int, gated: bool) -> list[Tiles]:
    """Tiles of so many rows for one of the products, the default first."""
    usual = default_tiles(problem, block_m, gated)
    known = [usual] if usual.block_m == block_m else []
    four_bits = problem.weights in FOUR_BIT_FORMATS
    deep = (128,) if problem.weights in BLOCK_FORMATS else (64, 128, 256) if four_bits else (64, 128)
    for columns in (32, 64, 128) if gated else (64, 128, 256):
        for depth in deep:
            for warps in (4, 8):
                for stages in (3, 4):
                    width = columns * (2 if gated else 1)
                    sums = block_m * width // (32 * warps)  # float32 registers a thread
                    kept = stages * depth * (block_m + width) * (1 if problem.fp8_activations else 2)
                    if four_bits:
                        kept = stages * depth * (2 * block_m + width // 2)
                    tried = Tiles(block_m, columns, depth, warps, stages)
                    if 8 <= sums <= 160 and kept <= problem.device.shared_memory_bytes and tried not in known:
                        known.append(tried)
    return known


def of_first(problem: ExpertsProblem, num_tokens: int) -> list[dict[str, Any]]:
    """Pairs of tiles that differ in the first product, of every height worth a try."""
    found = []
    for block_m in heights(problem, num_tokens):
        second = candidates(problem, block_m, False)[:1]
        found += [written(first, second[0]) for first in candidates(problem, block_m, True) if second]
    return found


def of_second(problem: ExpertsProblem, first: Tiles) -> list[dict[str, Any]]:
    """Pairs of tiles that differ in the second product."""
    return [written(first, second) for second in candidates(problem, first.block_m, False)]


def written(first: Tiles, second: Tiles) -> dict[str, Any]:
    """A pair of tiles as plain values."""
    return {"first": _numbers(first), "second": _numbers(second)}


def read(configuration: Mapping[str, Sequence[int]]) -> tuple[Tiles, Tiles]:
    """The pair of tiles that `written` wrote.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    first, second = (_tiles(configuration[name]) for name in ("first", "second"))
    if first.block_m != second.block_m:
        raise ValueError(f"{configuration}: both products work on the same tiles of rows")
    return first, second


def _numbers(tiles: Tiles) -> list[int]:
    return [tiles.block_m, tiles.block_n, tiles.block_k, tiles.num_warps, tiles.num_stages, tiles.group_m]


def _tiles(numbers: Sequence[int]) -> Tiles:
    made = Tiles(*numbers)
    if not all(type(number) is int and number > 0 for number in numbers):
        raise ValueError(f"{numbers} are not valid sizes")
    powers = numbers[:4]
    if any(number & (number - 1) for number in powers):
        raise ValueError(f"{numbers}: sizes of tiles, and numbers of warps, are powers of two")
    return made
