"""Tile shapes of latent attention, chosen from facts of the device."""

from __future__ import annotations

from kernelhub.backends.triton.attention.tiles import Tiles, power_of_two
from kernelhub.ops.attention.problem import FP8
from kernelhub.ops.mla.attention.problem import MlaProblem


def latent_tiles(problem: MlaProblem, rows: int) -> Tiles:
    """Tiles for sequences, or tokens with keys of their own, of `rows` query rows.

    The accumulator of a row is as wide as the latent, 512, so few rows fit: 16, or 64 with 8 warps, which is also
    the least that sm_90 and sm_10x multiply by warpgroups. With 64 rows, 32 keys at a time take 116 to 192 KB of
    shared memory; where there are 99, 16 keys do, and a rotary part of more than 64 leaves room for 16 rows only. An
    fp8 latent passes through registers to be converted, and with 64 rows spills up to 750 bytes on sm_90, with 32
    none. Products in float32 are fused multiply-adds.
    """
    large = problem.device.shared_memory_bytes >= 128 << 10
    narrow = power_of_two(problem.value_dim) + power_of_two(max(1, problem.rope_dim)) <= 576
    if problem.q_dtype == "float32":
        # On sm_10x one stage spills 16 bytes and two nothing, but with an fp8 cache kilobytes.
        two = problem.device.family == "blackwell" and problem.kv_dtype != FP8
        return Tiles(16, 16, 8, 2 if two else 1)
    if rows <= 32 or not (large or narrow):
        return Tiles(16, 64 if large or narrow else 32, 8, 2)
    if problem.kv_dtype == FP8:
        return Tiles(32, 64 if large else 32, 8, 2)
    return Tiles(64, 32 if large else 16, 8, 2)
