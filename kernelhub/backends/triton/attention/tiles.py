"""Tile shapes, selected from facts of the device: generation, shared memory, widths and element size.

Every choice is checked against the ahead-of-time report (`tests/backends/test_triton_ahead.py`): it compiles,
fits the shared memory of one block, and spills a few registers at most.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.ops.attention.problem import AttentionProblem


@dataclass(frozen=True)
class Tiles:
    """Sizes of one kernel.

    Attributes:
        block_m: query rows per program.
        block_n: keys per step of the loop.
        num_warps: warps per program.
        num_stages: steps of the loop whose loads are in flight.
        ahead: whether entries of the block table are read a step before the keys that they name, for the price of
            memory for one more step.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ahead: bool = False


def query_widths(problem: AttentionProblem) -> tuple[int, int]:
    """A head's width as one power of two, or as two that waste less (96 = 64 + 32, 192 = 128 + 64).

    Two parts mean two products into one accumulator. Triton miscompiles that on sm_10x, silently
    (https://github.com/linkedin/Liger-Kernel/pull/1413, seen with Triton 3.7.1 on sm_103), so there the
    width is padded to one.
    """
    width = problem.head_dim_qk
    whole = power_of_two(width)
    low = whole // 2
    rest = power_of_two(width - low)
    if width == whole or low + rest == whole or problem.device.family == "blackwell":
        return whole, 0
    return low, rest


def power_of_two(width: int) -> int:
    """The least power of two that holds `width`, at least 16, which a matrix product needs."""
    return max(16, 1 << (width - 1).bit_length())


def prefill_tiles(problem: AttentionProblem) -> Tiles:
    """Tiles of the prefill kernel.

    128 x 64 with 8 warps gives wgmma on sm_90 and tcgen05 on sm_10x; an H200 does best with
    two stages where three leave no room for a second program on a multiprocessor, and with 64 x 32 where a
    window leaves few keys to a tile (benchmarks/results/attention_h200.json). With mma.sync
    (sm_80, 86, 89, 120) the accumulator of 128 x 128 and the scores of 64 keys do not fit the registers
    together; 32 keys do, but not with the search for a ragged sequence, which takes 64 x 64. float32 has no
    tensor-core product exact enough, and as fused multiply-adds anything above 16 x 32 spills kilobytes.
    """
    width = _widest(problem)
    if problem.q_dtype == "float32":
        return Tiles(16, 32 if width <= 128 else 16, 4, 1)
    if problem.device.family == "hopper":
        if width <= 64 and problem.window_left:
            return Tiles(64, 32, 4, 2)
        both = sum(query_widths(problem)) + power_of_two(problem.head_dim_vo)
        return Tiles(128, 64, 8, 3 if both <= 320 else 2)
    if problem.device.family == "blackwell":
        if width <= 64:
            return Tiles(128, 64, 4, 3)
        return Tiles(128, 64, 8, 3) if width <= 128 else Tiles(64, 64, 8, 2)
    if width <= 64:
        return Tiles(128, 64, 8, 3)
    if width > 128:
        return Tiles(64, 32, 8, 2)
    return Tiles(64, 64, 8, 2) if problem.ragged else Tiles(128, 32, 8, 2)


def split_tiles(problem: AttentionProblem, rows: int) -> Tiles:
    """Tiles of the split-KV kernel for sequences of `rows` query rows, where `splits.HOPPER` has none."""
    width = _widest(problem)
    if problem.q_dtype == "float32":
        if width <= 128:
            return Tiles(16, 32, 4, 1)
        # Which of the two spills nothing differs: 4 warps on sm_86, 89 and 120, 8 on the others.
        return Tiles(16, 16, 4 if problem.device.shared_memory_bytes < 128 << 10 else 8, 1)
    block_m = min(64, power_of_two(rows))
    num_warps = 8 if block_m == 64 else 4
    if problem.device.family == "hopper" and width <= 128:
        return Tiles(block_m, 128 if block_m == 16 else 64, 4, 3)
    if width <= 128:
        return Tiles(block_m, 64, num_warps, 3 if width <= 64 or _has_warpgroup_products(problem) else 2)
    return Tiles(block_m, 32, num_warps, 2)


def _widest(problem: AttentionProblem) -> int:
    return max(sum(query_widths(problem)), power_of_two(problem.head_dim_vo))


def _has_warpgroup_products(problem: AttentionProblem) -> bool:
    """sm_90 and sm_10x multiply from shared memory by whole warpgroups, and have 227 KB of it."""
    return problem.device.family in ("hopper", "blackwell")
