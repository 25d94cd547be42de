"""Tile shapes of grouped products, selected from facts of the device and the number of rows per group.

Every choice is checked against the ahead-of-time report (`tests/backends/test_triton_ahead.py`): it compiles, fits the
shared memory of one block, and hardly spills.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.ops.gemm.grouped.problem import BLOCKS, FP4, FP8, SMALL, GroupedGemmProblem

FEW, SOME, MANY = 16, 64, 128  # rows of a tile


@dataclass(frozen=True)
class Tiles:
    """Sizes of one kernel.

    Attributes:
        block_m, block_n, block_k: of a tile of the product and a step of its sum.
        num_warps: warps per program.
        num_stages: steps whose loads are in flight.
        swap: compute the tile transposed.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool = False


def rows_of_a_tile(problem: GroupedGemmProblem, rows: int) -> int:
    """FEW, SOME or MANY, for contiguous rows in all or masked rows at most: the mean of a group is not to fill less
    than a quarter of a tile. Most padded rows are unused, and their number is not on the host."""
    if problem.masked:
        return FEW if rows <= FEW else SOME
    mean = rows // problem.num_groups
    return FEW if mean <= FEW else SOME if mean <= SOME else MANY


def tiles(problem: GroupedGemmProblem, block_m: int) -> Tiles:
    """Tiles of `block_m` rows, or less where that many do not fit."""
    warpgroups = problem.device.family in ("hopper", "blackwell")  # products of 64 rows and more from shared memory
    roomy = problem.device.shared_memory_bytes >= 128 << 10
    if problem.a_dtype == "float32":  # no tensor-core product is exact enough
        return Tiles(min(block_m, 32), 32, 64 if problem.b_dtype == FP4 else 32, 4, 2)
    if problem.k % 16:  # rows may begin anywhere: elements are loaded one by one, through registers
        block_m = min(block_m, SOME)
    if problem.b_scale == "mxfp8":  # decoded to bfloat16 in the tile, as by `fp8_gemm`
        if problem.k % 16:
            return Tiles(FEW, 32, 64, 8, 2)
        if block_m <= SOME:
            # Registers hold decoded operands on their way to mma.sync: 4 warps spill some.
            return Tiles(block_m, 64, 128, 4 if warpgroups else 8, 3, swap=True)
        hopper = problem.device.family == "hopper"
        return Tiles(MANY, 64, 64 if hopper or not roomy else 128, 4 if hopper else 8, 3)
    if problem.a_dtype == FP8 and problem.a_scale not in SMALL:
        if problem.k % 16:
            return Tiles(FEW, 32, 128, 8, 2)
        if block_m == FEW:
            return Tiles(FEW, 128, 128, 4, 4, swap=warpgroups)
        if block_m == SOME:
            return Tiles(SOME, 128, 128, 4 if warpgroups else 8, 3)
        narrow = problem.b_scale in BLOCKS and problem.device.family != "hopper"
        return Tiles(MANY, 64 if narrow else 128, 128, 8, 3)
    if problem.b_dtype == FP4:
        if problem.b_scale == "mxfp4" and problem.a_dtype == "float16":
            # Steps of 32, what a scale is for. With those Triton 3.7 cannot lay out weights for wgmma and tcgen05.
            return Tiles(min(block_m, 32), 128, 32, 4, 3)
        # A quarter of a step is the depth of each of four products, computed transposed.
        if not warpgroups:
            return Tiles(min(block_m, SOME), 64, 64, 4, 3, swap=True)
        if block_m == FEW:
            return Tiles(FEW, 128, 128, 4, 3, swap=True)
        # Of more than 64 rows Triton 3.7 makes empty kernels for tcgen05. Steps of 128 took 0.88 ms on an H200 where
        # those of 64 took 1.01 (128 experts of 1536 x 2048, nvfp4, 32768 rows).
        return Tiles(block_m if problem.device.family == "hopper" else SOME, 128, 128, 8, 3, swap=True)
    if block_m == FEW:
        return Tiles(FEW, 128, 64, 4, 4, swap=warpgroups)
    if block_m == SOME:
        return Tiles(SOME, 128, 64, 8 if problem.k % 16 else 4, 4 if roomy else 3)
    return Tiles(MANY, 128, 64, 8, 4 if roomy else 3)
