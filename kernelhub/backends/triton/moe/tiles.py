"""Tile shapes of the two matrix products: measured ones where there are, else chosen from facts of the device.

Every default is checked against the ahead-of-time report (`tests/backends/test_triton_ahead.py`): it compiles, fits
the shared memory of one block, and spills a few registers at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kernelhub.backends.triton.moe.tuned import TUNED, Tiles, Tuned
from kernelhub.backends.triton.requirements import has_float8
from kernelhub.ops.moe.experts.problem import BLOCK_FORMATS, FOUR_BIT_FORMATS, PLAIN, ExpertsProblem

EXACT, NEAREST, DEFAULT = "exact", "nearest", "default"


@dataclass(frozen=True)
class ExpertTiles:
    """Tiles of both products, which have the same rows, and where they are from.

    Attributes:
        first: of gate and up; `block_n` counts columns of each.
        second: of the down projection.
        source: ``"exact"`` (measured for this layer and number of tokens), ``"nearest"`` (measured for this layer
            and another number of tokens) or ``"default"``.
    """

    first: Tiles
    second: Tiles
    source: str

    def __str__(self) -> str:
        words = {EXACT: "measured", NEAREST: "measured for another number of tokens", DEFAULT: "default"}
        return f"{self.first} and {self.second} ({self.source}: {words[self.source]})"


def choose(problem: ExpertsProblem, num_tokens: int, table: Sequence[Tuned] = TUNED) -> ExpertTiles:
    """The tiles of a call."""
    fitting = [entry for entry in table if entry.fits(problem)]
    if not fitting:
        block_m = rows_of_a_tile(num_tokens * problem.top_k, problem.num_experts)
        return ExpertTiles(default_tiles(problem, block_m, True), default_tiles(problem, block_m, False), DEFAULT)
    best = min(fitting, key=lambda entry: (abs(math.log(entry.num_tokens / num_tokens)), entry.num_tokens))
    return ExpertTiles(best.first, best.second, EXACT if best.num_tokens == num_tokens else NEAREST)


def rows_of_a_tile(pairs: int, num_experts: int) -> int:
    """The least that holds the rows of an expert if each has as many, from 16, which a product needs, to 128."""
    rows = -(-pairs // num_experts)
    return next((block for block in (16, 32, 64) if rows <= block), 128)


def default_tiles(problem: ExpertsProblem, block_m: int, gated: bool) -> Tiles:
    """Tiles for shapes without measurements.

    128 columns of weights, which are 64 of gate and 64 of up in the first product, move 16 KB a step. With many rows
    128 x 128 gives wgmma or tcgen05 enough to do for the bytes it reads, except where sums are scaled after each step
    (blocks): then 64 rows. mma.sync (sm_80, 86, 89, 120) takes
    decoded weights from registers too, where 64 columns of both gate and up spill a kilobyte, 32 nothing.
    """
    small = problem.device.shared_memory_bytes < 128 << 10
    if problem.dtype == "float32":
        # No tensor core is exact enough; fused multiply-adds of larger tiles spill.
        depth = 128 if problem.weights in BLOCK_FORMATS else 64 if problem.weights in FOUR_BIT_FORMATS else 32
        return Tiles(min(block_m, 32), 16 if gated else 32, depth, 4, 1)
    if problem.weights in FOUR_BIT_FORMATS:
        return _fp4_tiles(problem, block_m, gated)
    blocks, native = problem.weights in BLOCK_FORMATS, problem.fp8_activations and has_float8(problem.device)
    if blocks:
        block_m = min(block_m, 64)
    decoded = problem.weights != PLAIN and not native
    columns = 64 if gated else 128
    if decoded and problem.device.family not in ("hopper", "blackwell") and (gated or blocks):
        columns //= 2
    return Tiles(
        block_m,
        columns,
        # A step is a block; and fp8 moves as many bytes with 128 as bfloat16 with 64.
        block_k=128 if blocks or native else 64,
        num_warps=8 if block_m >= 64 else 4,
        num_stages=2 if small and problem.weights != PLAIN else 3,
    )


def _fp4_tiles(problem: ExpertsProblem, block_m: int, gated: bool) -> Tiles:
    """Weights of 4 bits are decoded for each tile of rows anew, a quarter of a step in each of four products.

    On an H200, ms: gpt-oss 120B (mxfp4, 2880 wide) with 256 tokens, 8 rows an expert, took 0.94 with tiles of 128 x 128
    in the second product, 0.90 with 64 x 256; with 1024 tokens, 32 rows, 1.49 in tiles of 32 rows, 1.95 in those of 64;
    with 4096, 128 rows, 4.79 in steps of 64, 3.83 with those here. Qwen3 30B (nvfp4, 2048 x 768) with 1024 tokens, 64
    rows: 0.49 with 128 columns and 8 warps, 0.40 with 64 and 4.
    """
    family = problem.device.family
    if family not in ("hopper", "blackwell"):
        return Tiles(min(block_m, 64), 32 if gated else 64, 64, 4, 3)
    if block_m == 16:
        return Tiles(16, 64, 128 if gated else 256, 4, 3)
    if block_m == 32:
        return Tiles(32, 64 if gated else 128, 128, 4, 3)
    if block_m == 64 or family == "blackwell":
        # Of more than 64 rows, or 128 columns of both, Triton 3.7 makes empty kernels for tcgen05.
        return Tiles(64, 64, 128, 4, 3)
    return Tiles(128, 128, 128, 8, 3) if gated else Tiles(128, 256, 64, 8, 3)
