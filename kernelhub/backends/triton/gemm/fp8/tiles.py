"""Tiles of float8 products, selected from facts of the device and checked against the ahead-of-time report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kernelhub.backends.triton.requirements import has_float8
from kernelhub.ops.gemm.fp8.problem import BLOCK, MX, ROW_BLOCK
from kernelhub.probes.device import DeviceFacts

FEW = 64  # rows: up to these, b is the left operand and the tile is as high as there are rows
_MOST_SPLITS = 16
_BLOCKS = (BLOCK, ROW_BLOCK)  # whose sums are scaled after each 128 columns
_FEWEST_BLOCKS = 4  # of 128 columns that are worth a program of their own: 32 KB of weights


@dataclass(frozen=True)
class Tiles:
    """Sizes of one kernel.

    Attributes:
        block_m: rows of a per program.
        block_n: rows of b per program.
        block_k: columns per step of the loop.
        num_warps: warps per program.
        num_stages: steps whose loads are in flight.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def swapped(self) -> bool:
        """Whether b is the left operand."""
        return self.block_m <= FEW


def tiles(device: DeviceFacts, scaling: str, rows: int, n: int, k: int) -> Tiles:
    """Tiles for a product of so many rows with weights [n, k].

    On an H200, in ms: 16 rows with 7168 x 18432 took 0.049 in tiles of 16 x 128, 0.052 of 16 x 64. Of sums that are
    scaled once, 4096 rows with 24576 x 1536 took 0.362 with 4 warps and 3 stages, 0.437 with 8 and 4; where sums are
    scaled by block, 0.888 and 0.455. 256 rows with 7168 x 2304, too few for as many tiles of 128 x 128 as there are
    multiprocessors: 0.019 in halves of them, 0.030 in whole ones. 1024 rows with 576 x 7168, where the last whole tile
    is half empty: 0.026 in halves, 0.031 in whole ones.
    """
    large = device.shared_memory_bytes >= 128 << 10
    hopper = device.family == "hopper"
    if rows <= FEW:
        block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        # Registers hold a block's bfloat16 operands on their way to mma.sync: 4 warps spill some.
        from_registers = scaling == MX and device.family not in ("hopper", "blackwell")
        wide = hopper and scaling != MX and n >= 7168 and k >= 8192
        return Tiles(block_m, 128 if wide else 64, 128, 8 if from_registers else 4, 4)
    if scaling == MX:
        return Tiles(128, 64, 64 if hopper or not large else 128, 4 if hopper else 8, 3)
    if not has_float8(device):
        return Tiles(128, 64, 128, 8, 3)
    if hopper:
        idle = -(-rows // 128) * -(-n // 128) < device.num_sms
        if scaling in _BLOCKS:
            if idle and k <= 4096:
                return Tiles(128, 64, 128, 4, 4)
            return Tiles(128, 64 if idle and n % 128 else 128, 128, 8, 4)
        return Tiles(64, 128, 128, 4, 4) if idle and k <= 4096 else Tiles(128, 128, 128, 4, 3)
    # Sums scaled by block leave the tensor memory of sm_10x: 128 x 128 of them spill 1 KB.
    if scaling in _BLOCKS:
        return Tiles(128, 64, 128, 8, 4 if large else 3)
    return Tiles(128, 128, 128, 8, 4 if large else 3)


def tiles_of_weights(device: DeviceFacts, rows: int, k: int) -> Tiles:
    """Tiles of float8 weights beside activations of 16 bits: those take the room of two float8 operands.

    Nothing was measured yet. Weights are decoded in registers, which wgmma takes its left operand from, so up to
    64 rows they are that; a tile of 128 rows keeps its activations in shared memory instead.
    """
    large = device.shared_memory_bytes >= 128 << 10
    if k % 16:  # rows may begin anywhere: elements are loaded one by one, through registers
        return Tiles(16, 32, 128, 4, 2)
    if rows <= FEW:
        block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        return Tiles(block_m, 64, 128, 4, 4 if large else 3)
    return Tiles(128, 64, 128, 8, 3) if large else Tiles(64, 64, 128, 4, 3)


def tiles_of_e5m2(device: DeviceFacts, scaling: str, rows: int, n: int, k: int) -> Tiles:
    """Tiles of an operand in e5m2, where both are decoded in registers on every device, as all float8 is before sm_89.

    Nothing was measured yet.
    """
    usual = tiles(device, scaling, rows, n, k)
    return usual if usual.swapped or scaling == MX else Tiles(128, 64, 128, 8, 3)


def splits_of(device: DeviceFacts, programs: int, k: int) -> int:
    """Into how many parts K is split, so that about two programs run on each multiprocessor."""
    blocks = -(-k // 128)
    return max(1, min(2 * device.num_sms // programs, blocks // _FEWEST_BLOCKS, _MOST_SPLITS))


def candidates(device: DeviceFacts, scaling: str, rows: int, n: int, k: int) -> Iterator[Tiles]:
    """Further tiles of a product for `kernelhub tune`, without those of `tiles`.

    A block's scale is one of a tile's columns, so of those no tile has more than 128. Sums of a thread fill 8 to 128
    registers, and operands in flight fit the shared memory of a block, where the device has such.
    """
    usual = tiles(device, scaling, rows, n, k)
    few = rows <= FEW
    heights = sorted({usual.block_m, max(16, usual.block_m // 2), min(64, usual.block_m * 2)}) if few else (64, 128)
    depths = (128,) if scaling in _BLOCKS else (64, 128) if scaling == MX else (64, 128, 256)
    itemsize = 2 if scaling == MX or not has_float8(device) else 1
    for block_m in heights:
        for block_n in (64, 128):
            for block_k in depths:
                for num_warps in (4, 8):
                    for num_stages in (3, 4):
                        made = Tiles(block_m, block_n, block_k, num_warps, num_stages)
                        sums = block_m * block_n // (32 * num_warps)
                        kept = num_stages * block_k * (block_m + block_n) * itemsize
                        fits = kept <= device.shared_memory_bytes or device.type == "cpu"
                        if made != usual and 8 <= sums <= 128 and fits:
                            yield made


def written(made: Tiles) -> dict[str, int]:
    """Tiles as plain values."""
    return asdict(made)


def read(configuration: Mapping[str, Any], scaling: str) -> Tiles:
    """The tiles that `written` wrote.

    Raises:
        TypeError, ValueError: they are none, or none that the scaling allows.
    """
    made = Tiles(**configuration)
    powers = (made.block_m, made.block_n, made.block_k, made.num_warps)
    if any(type(size) is not int or size < 1 for size in (*powers, made.num_stages)):
        raise ValueError(f"{dict(configuration)} are not valid sizes")
    if any(size & (size - 1) for size in powers) or made.block_m < 16:
        raise ValueError(f"{dict(configuration)}: sizes are powers of two, and rows at least 16")
    if scaling in _BLOCKS and (made.block_k != 128 or made.block_n > 128):
        raise ValueError(f"{dict(configuration)}: products scaled by block have steps of 128 and up to 128 columns")
    return made
