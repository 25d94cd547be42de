"""Tile shapes of latent attention, selected by facts about the device."""

from __future__ import annotations

from kernelhub.backends.triton.attention.tiles import Tiles, power_of_two
from kernelhub.ops.attention.problem import FP8
from kernelhub.ops.mla.attention.problem import MlaProblem


def latent_tiles(problem: MlaProblem, rows: int) -> Tiles:
    """Tiles for sequences, or tokens with keys of their own, of `rows` query rows.

    The accumulator of a row is as wide as the latent, 512, so few rows fit: 16, or 64 with 8 warps, which is also
    the least that sm_90 and sm_10x multiply by warpgroups. Products in float32 are fused multiply-adds.

    On an H200, 32 sequences of 4096 tokens took, in ms: 16 heads 0.091 with 64 keys and 4 warps, 0.115 with 8 warps,
    0.107 as a tile of 64 rows; 128 heads 0.192 with 64 keys, 0.241 with 32. Of an fp8 latent, which passes through
    registers to be converted, 128 heads 0.217 with 128 keys in one stage, 0.282 with 64, 0.330 in tiles of 32 rows.
    Elsewhere 64 keys of 64 rows do not fit: 32 take 116 to 176 KB of shared memory; where there are 99, 16 do, and a
    rotary part of more than 64 leaves room for 16 rows only. An fp8 latent spills there with 64 rows, with 32 not.
    """
    large = problem.device.shared_memory_bytes >= 128 << 10
    narrow = power_of_two(problem.value_dim) + power_of_two(max(1, problem.rope_dim)) <= 576
    hopper = problem.device.family == "hopper" and narrow
    fp8 = problem.kv_dtype == FP8
    if problem.q_dtype == "float32":
        # On sm_10x one stage spills 16 bytes and two nothing, but with an fp8 cache kilobytes.
        return Tiles(16, 16, 8, 2 if problem.device.family == "blackwell" and not fp8 else 1)
    if hopper and rows > 16:
        return Tiles(64, 128, 8, 1) if fp8 else Tiles(64, 64, 8, 2)
    if rows <= 32 or not (large or narrow):
        return Tiles(16, 64 if large or narrow else 32, 4 if hopper else 8, 2)
    if fp8:
        return Tiles(32, 64 if large else 32, 8, 2)
    return Tiles(64, 32 if large else 16, 8, 2)
