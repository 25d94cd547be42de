"""From a call of `fp8_gemm` to its Triton launches. The number of rows decides the tiles and whether K is split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of, strides_of_scale
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.gemm.fp8.decoded import Decoded
from kernelhub.backends.triton.gemm.fp8.product import add_parts_kernel, product_kernel
from kernelhub.backends.triton.gemm.fp8.tiles import (
    Tiles,
    candidates,
    read,
    splits_of,
    tiles,
    tiles_of_e5m2,
    tiles_of_weights,
    written,
)
from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.requirements import has_float8
from kernelhub.dispatch.configuration import Configurable, Configuration, look_up
from kernelhub.ops.gemm.fp8.adapter import Fp8GemmAdapter, WeightOnlyAdapter
from kernelhub.ops.gemm.fp8.problem import E8M0, MX, ROW, TENSOR, Fp8GemmProblem
from kernelhub.runtime.counters import counters_of, no_counters

if triton.knobs.runtime.interpret:
    interpreter.repair()

_GROUP_M = 8  # tiles of rows that are gone over together: their 8 x 128 rows of a stay in L2
_ADDED = 1024  # columns that a program adds up, 8 per thread
# Rows up to which the launch of the product adds up its parts, too, where there are counters. H200, one launch / two,
# us, 1, 16 and 64 rows: in blocks 2112 x 7168 8.8 / 10.0, 9.3 / 10.2 and 12.8 / 12.1, 576 x 7168 5.3 / 7.0, 5.6 / 7.2
# and 9.6 / 8.5; by row 4096 x 4096 8.5 / 9.2, 8.5 / 9.1 and 10.8 / 10.7 (benchmarks/results/one_launch_h200.json).
ONE_LAUNCH_ROWS = 16
# Rows from which on operands with a scale for each 32 columns are decoded for cuBLAS. H200, in graphs, tiles / decoded,
# us, 32, 48, 96 and 1024 rows: 7168 x 2304 27 / 27, 42 / 29, 50 / 29 and 556 / 82; 24576 x 1536 44 / 61, 63 / 62,
# 91 / 65 and 683 / 185; 2112 x 7168 24 / 31, 31 / 31, 42 / 32 and 280 / 70 (mxfp8_rows_h200.json).
DECODED_FROM = 33
_MOST_KEPT = 4096  # numbers of rows whose measured tiles are kept, per adapter


class Fp8Gemm(Fp8GemmAdapter, WeightOnlyAdapter, Configurable):
    """`fp8_gemm` on any GPU."""

    def __init__(self, problem: Fp8GemmProblem) -> None:
        super().__init__(problem)
        self.native = has_float8(problem.device) and not problem.e5m2
        self._launchers: dict[tuple[Tiles, bool], Launcher] = {}
        self._repeated = Repeated()
        # torch multiplies into float32 on NVIDIA GPUs only.
        decodes = problem.scaling == MX and problem.device.vendor in ("nvidia", "cpu")
        self._decoded = Decoded(problem) if decodes and problem.weight_only is None else None
        self._measured: Mapping[int, Configuration] = {}
        self._chosen: dict[int, Tiles] = {}
        self._add = Launcher(add_parts_kernel, {"BLOCK": _ADDED, "HAS_BIAS": problem.bias}, num_warps=4)

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        self._launch(a, b, a_scale, b_scale, bias, out)

    def launch_weights(self, a: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        self._launch(a, b, None, b_scale, bias, out)

    def _launch(
        self, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        given = (a, b, a_scale, b_scale, bias, out)
        self._repeated.run(*self.identified(*given), self._launch_anew, *given)

    def repeated(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> Any:
        return self._repeated.sequence_of(*self.identified(a, b, a_scale, b_scale, bias, out))

    def _launch_anew(
        self, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        m, n = out.shape
        if self._decoded is not None and m >= DECODED_FROM:
            assert a_scale is not None
            with on_device_of(a):
                self._decoded.launch(a, b, a_scale, b_scale, bias, out)
            return
        tile, programs, splits = self._cut(m)
        with on_device_of(a):
            if splits == 1:
                self._multiply(tile, programs, 1, a, b, a_scale, b_scale, bias, out, None, None)
                return
            parts = torch.empty(splits, m, n, dtype=torch.float32, device=a.device)
            counters = counters_of(out, programs) if m <= ONE_LAUNCH_ROWS else None
            self._multiply(tile, programs * splits, splits, a, b, a_scale, b_scale, bias, out, parts, counters)
            stride_bias = 0 if bias is None else bias.stride(0)
            aligned = not (parts.data_ptr() | out.data_ptr()) & 15
            # Calls without counters, such as captured ones, need the second kernel.
            add = self._add if counters is None else self._add.prepare
            add(
                m * -(-n // _ADDED),
                (a.get_device(), out.stride(), stride_bias) if aligned else None,
                parts,
                out,
                bias,
                m,
                n,
                splits,
                *out.stride(),
                stride_bias,
            )

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """Parts of K, in float32, or decoded operands and their product.

        Within a tile's rows more of them take more parts, and the last rows of a tile the most.
        """
        decoded = 0
        if self._decoded is not None and num_tokens >= DECODED_FROM:
            decoded = self._decoded.workspace_bytes(num_tokens)
            num_tokens = DECODED_FROM - 1
        last = {num_tokens, *(rows for rows in (16, 32, *range(64, num_tokens, 64)) if rows < num_tokens)}
        if self._measured:  # whose tiles change at any number of rows
            last = set(range(1, num_tokens + 1))
        cuts = {rows: self._cut(rows)[2] for rows in last}
        parts = (splits * rows * self.problem.n * 4 for rows, splits in cuts.items() if splits > 1)
        return max(decoded, max(parts, default=0))

    def configurations(self, num_tokens: int, stage: int, best: Configuration | None) -> Sequence[Configuration]:
        problem = self.problem
        if stage or problem.weight_only is not None or problem.e5m2:
            return ()
        if self._decoded is not None and num_tokens >= DECODED_FROM:
            return ()
        tried = candidates(problem.device, problem.scaling, num_tokens, problem.n, problem.k)
        return [written(tile) for tile in tried]

    def configure(self, measured: Mapping[int, Configuration]) -> None:
        for configuration in measured.values():
            read(configuration, self.problem.scaling)
        self._measured = measured
        self._chosen.clear()
        self._repeated.clear()

    def _tile(self, rows: int) -> Tiles:
        """Tiles for so many rows: measured ones if there are any, else by the rule."""
        problem = self.problem
        if problem.weight_only is not None:
            return tiles_of_weights(problem.device, rows, problem.k)
        if problem.e5m2:
            return tiles_of_e5m2(problem.device, problem.scaling, rows, problem.n, problem.k)
        if not self._measured:
            return tiles(problem.device, problem.scaling, rows, problem.n, problem.k)
        tile = self._chosen.get(rows)
        if tile is None:
            found = look_up(self._measured, rows).configuration
            if found is None:
                tile = tiles(problem.device, problem.scaling, rows, problem.n, problem.k)
            else:
                tile = read(found, problem.scaling)
            if len(self._chosen) >= _MOST_KEPT:
                self._chosen.clear()
            self._chosen[rows] = tile
        return tile

    def _cut(self, rows: int) -> tuple[Tiles, int, int]:
        """Tiles, programs of a whole K, and parts of K."""
        tile = self._tile(rows)
        programs = -(-rows // tile.block_m) * -(-self.problem.n // tile.block_n)
        return tile, programs, splits_of(self.problem.device, programs, self.problem.k)

    def _multiply(
        self,
        tile: Tiles,
        programs: int,
        splits: int,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor | None,
        b_scale: Tensor,
        bias: Tensor | None,
        out: Tensor,
        parts: Tensor | None,
        counters: Tensor | None,
    ) -> None:
        problem = self.problem
        if problem.weight_only is not None:
            b = b.view(torch.uint8)
        elif not self.native or problem.scaling == MX:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        if a_scale is not None and problem.a_scale_dtype == E8M0:
            a_scale = a_scale.view(torch.uint8)
        if problem.b_scale_dtype == E8M0:
            b_scale = b_scale.view(torch.uint8)
        strides = (
            0,
            *a.stride(),
            0,
            *b.stride(),
            0,
            *out.stride(),
            0,
            *((0, 0) if a_scale is None else strides_of_scale(a_scale)),
            0,
            *strides_of_scale(b_scale),
            0 if bias is None else bias.stride(0),
        )
        aligned = not (a.data_ptr() | b.data_ptr() | out.data_ptr() | (0 if parts is None else parts.data_ptr())) & 15
        of_parts = parts is not None
        launcher = self._launchers.get((tile, of_parts)) or self._launcher(tile, of_parts)
        launcher(
            programs,
            (a.get_device(), strides) if aligned else None,
            a,
            b,
            out,
            parts,
            (no_counters(out) if counters is None else counters) if of_parts else None,
            a_scale,
            b_scale,
            bias,
            out.shape[-2],
            problem.n,
            problem.k,
            splits,
            int(counters is not None),
            *strides,
        )

    def _launcher(self, tile: Tiles, of_parts: bool) -> Launcher:
        problem = self.problem
        static: dict[str, Any] = {
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP_M": _GROUP_M,
            "SCALING": ROW if problem.scaling == TENSOR else problem.scaling,
            "A_E8M0": problem.a_scale_dtype == E8M0,
            "B_E8M0": problem.b_scale_dtype == E8M0,
            "HAS_BIAS": problem.bias,
            "SWAPPED": tile.swapped,
            "EVEN_K": problem.k % tile.block_k == 0,
            "PARTS": of_parts,
            "NATIVE": self.native,
            "WEIGHT_ONLY": problem.weight_only is not None,
            "A_E5M2": problem.e5m2,
            "B_E5M2": False,
        }
        launcher = Launcher(product_kernel, static, num_warps=tile.num_warps, num_stages=tile.num_stages)
        self._launchers[tile, of_parts] = launcher
        return launcher
