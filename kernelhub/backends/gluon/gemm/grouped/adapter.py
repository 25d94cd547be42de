"""From a call of `grouped_gemm` to its Gluon launch: all groups in one, rows sorted by group or in their own places."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

from torch import Tensor

from kernelhub.backends.gluon.gemm.grouped.fp8 import grouped_fp8_kernel
from kernelhub.backends.gluon.gemm.grouped.halves import grouped_halves_kernel
from kernelhub.backends.gluon.launch import Launcher, descriptor, rows_for_tma
from kernelhub.backends.shared.operands import is_aligned, on_device_of
from kernelhub.backends.shared.repeated_grouped import RepeatedGrouped
from kernelhub.backends.shared.scales import as_bytes
from kernelhub.ops.gemm.grouped.adapter import GroupedOperands
from kernelhub.ops.gemm.grouped.problem import BLOCKS, GroupedGemmProblem

_HIGH_FROM = 256  # rows of a group on average from which tiles of 256 rows are mostly full
# Rows of a group of halves on average, up to which tiles of 64 rows are taken, by gluon_tiles_h200.json. 128 experts of
# Qwen3 30B-A3B with 8 to 256 rows take 0.83 to 0.99 of the time in tiles of 64, as routing leaves the last tile of most
# part empty; 128 groups of 256 rows each take 1.06, of 1024 rows 1.05.
_FEW_ROWS = 256
_ACROSS = 128  # rows of weights that are copied at once
_GROUP = 8  # tiles of rows that share columns of weights before the next columns come


class Tile(NamedTuple):
    """Rows, columns and depth of a step."""

    m: int
    n: int
    k: int


class Rows(NamedTuple):
    """Matrices that follow each other, as one: `matrix` [all rows, K], of which each has `apart`."""

    matrix: Tensor
    apart: int


class _Grouped(RepeatedGrouped):
    def __init__(self, problem: GroupedGemmProblem) -> None:
        super().__init__(problem)
        self._launchers: dict[Tile, Launcher] = {}

    def _launch_anew(self, operands: GroupedOperands, out: Tensor) -> None:
        problem = self.problem
        masked, groups, bias = problem.masked, problem.num_groups, operands.bias
        lengths = operands.group_sizes if masked else operands.offsets
        assert lengths is not None
        total = out.shape[-2]
        tile = self.tile(total if masked else total // groups)
        launcher = self._launchers.get(tile)
        if launcher is None:
            launcher = self._launchers[tile] = self.launcher(tile)
        a = as_rows(operands.a) if masked else Rows(rows_for_tma(operands.a), 0)
        b = as_rows(operands.b)
        tiles_m = groups * -(-total // tile.m) if masked else total // tile.m + min(groups, total)
        programs = min(problem.device.num_sms, tiles_m * -(-problem.n // tile.n))
        scales, of_scales = self.scales(operands)
        strides = (
            *of_scales,
            *((0, 0) if bias is None else bias.stride()),
            *(out.stride() if masked else (0, *out.stride())),
        )
        with on_device_of(out):
            launcher(
                programs,
                (out.get_device(), strides, out.data_ptr() & 15, None if bias is None else bias.dtype),
                descriptor(a.matrix, (tile.m, tile.k)),
                descriptor(b.matrix, (_ACROSS, tile.k)),
                out,
                *scales,
                bias,
                lengths,
                groups,
                total,
                a.apart,
                problem.n,
                problem.k,
                b.apart,
                *strides,
            )

    @abc.abstractmethod
    def tile(self, rows: int) -> Tile:
        """For so many rows of a group on average, or at most."""

    @abc.abstractmethod
    def launcher(self, tile: Tile) -> Launcher:
        """The kernel with its static arguments."""

    def scales(self, operands: GroupedOperands) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Arguments that only quantised operands have, and their strides."""
        return (), ()


class GroupedFp8(_Grouped):
    """float8, scaled by tensor, token and channel, or block."""

    def tile(self, rows: int) -> Tile:
        return Tile(256 if rows >= _HIGH_FROM else 128, 128, 128)

    def launcher(self, tile: Tile) -> Launcher:
        problem = self.problem
        static: dict[str, Any] = {
            "BM": tile.m,
            "BN": tile.n,
            "WAVES": tile.m // 128,
            "STAGES": 4 if tile.m == 256 else 6,
            "BLOCKS": problem.b_scale in BLOCKS,
            "A_E8M0": problem.a_scale == "group_e8m0",
            "B_E8M0": problem.b_scale == "block_e8m0",
            "HAS_BIAS": problem.bias,
            "MASKED": problem.masked,
            "GROUP": _GROUP,
        }
        return Launcher(grouped_fp8_kernel, static)

    def scales(self, operands: GroupedOperands) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        a_scale, b_scale = operands.a_scale, operands.b_scale
        assert a_scale is not None
        assert b_scale is not None
        strides = (*_of_rows(a_scale, self.problem), *_of_weights(b_scale, self.problem))
        return (as_bytes(a_scale), as_bytes(b_scale)), strides


class GroupedHalves(_Grouped):
    """bfloat16 or float16."""

    def tile(self, rows: int) -> Tile:
        return Tile(64 if rows <= _FEW_ROWS else 128, 256, 64)

    def launcher(self, tile: Tile) -> Launcher:
        problem = self.problem
        static = {
            "BM": tile.m,
            "BN": tile.n,
            "BK": tile.k,
            "STAGES": 5 if tile.m == 64 else 4,
            "HAS_BIAS": problem.bias,
            "MASKED": problem.masked,
            # float32 fills sectors of memory as it is, and is too wide for the shared memory that is left.
            "BY_LINES": problem.out_dtype != "float32",
            "GROUP": _GROUP,
        }
        return Launcher(grouped_halves_kernel, static)


def as_rows(matrices: Tensor) -> Rows:
    """Matrices [G, R, K] as one, a copy where they cannot be read so by TMA."""
    groups, rows, _ = matrices.shape
    between, apart = matrices.stride(0), matrices.stride(1)
    if not is_aligned(matrices) or (groups > 1 and between % apart):
        matrices = matrices.contiguous() if not matrices.is_contiguous() else matrices.clone()
        between, apart = matrices.stride(0), matrices.stride(1)
    many = between // apart if groups > 1 else rows
    whole = matrices.as_strided(((groups - 1) * many + rows, matrices.shape[2]), (apart, 1))
    return Rows(rows_for_tma(whole), many)


def _of_rows(scale: Tensor, problem: GroupedGemmProblem) -> tuple[int, ...]:
    """(group, row, block of columns)."""
    if problem.a_scale == "tensor":
        return 0, 0, 0
    strides = scale.stride() if problem.masked else (0, *scale.stride())
    return strides if len(strides) == 3 else (*strides, 0)


def _of_weights(scale: Tensor, problem: GroupedGemmProblem) -> tuple[int, ...]:
    """(group, row or block of rows, block of columns)."""
    if problem.b_scale == "tensor":
        return (0 if scale.numel() == 1 else scale.stride(0)), 0, 0
    strides = scale.stride()
    return strides if len(strides) == 3 else (*strides, 0)
