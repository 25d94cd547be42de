"""The tiled layout of float4 weights and scales that the Triton kernel reads contiguously.

    codes [N / 64, K / 128, 64, 64 bytes], scale [N / 64, K / 128, 64, 128 / group], both filled up with zero bytes

Nothing inside a tile is moved. Zero codes with the zero byte as scale are 0 in both formats.
"""

from __future__ import annotations

from torch import Tensor

from kernelhub.ops.gemm.fp4.problem import GROUP
from kernelhub.ops.packed import PackedWeight

LAYOUT = "fp4.tiles64x128.v1"
TILE_N, TILE_K = 64, 128


def pack(codes: Tensor, scale: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes, bytes [N, K / 2], and scales, bytes [N, K / group], in tiles."""
    return _tiles(codes, TILE_K // 2), _tiles(scale, TILE_K // group)


def unpack(packed: PackedWeight) -> tuple[Tensor | None, ...]:
    """The inverse of `pack`: codes, scale and global scale."""
    codes, scale = packed.tensors["codes"], packed.tensors["scale"]
    assert codes is not None
    assert scale is not None
    n, half = packed.shape
    scales = _rows(scale, n, half * 2 // GROUP[packed.facts["format"]]).view(packed.facts["scale_dtype"])
    return _rows(codes, n, half).view(packed.dtype), scales, packed.tensors["global_scale"]


def _tiles(matrix: Tensor, width: int) -> Tensor:
    n, columns = matrix.shape
    high, wide = -(-n // TILE_N), -(-columns // width)
    padded = matrix.new_zeros(high * TILE_N, wide * width)
    padded[:n, :columns] = matrix
    return padded.view(high, TILE_N, wide, width).transpose(1, 2).contiguous()


def _rows(tiles: Tensor, n: int, columns: int) -> Tensor:
    return tiles.transpose(1, 2).flatten(2).flatten(0, 1)[:n, :columns].contiguous()
