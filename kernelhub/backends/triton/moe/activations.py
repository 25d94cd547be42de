"""Launches what brings activations into the form that the products of `triton.experts` take."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.moe.quantize import quantize_kernel
from kernelhub.backends.triton.moe.rounding import join_kernel, round_kernel
from kernelhub.backends.triton.planes import Planes
from kernelhub.ops.moe.experts.activations import MX_GROUP, NVFP4_GROUP
from kernelhub.ops.moe.experts.problem import FOUR_BIT_FORMATS, MXFP8, NVFP4, ExpertsProblem
from kernelhub.ops.moe.experts.weights import BLOCK

_GROUPS = {MXFP8: MX_GROUP, NVFP4: NVFP4_GROUP}
_AT_ONCE = 2048  # elements of a program
_JOINED_AT_ONCE = 8  # times 128 columns of gate and up


class Activations:
    """Rows of one width of a problem: as they are, as codes of fp8, as values of a format, as planes."""

    def __init__(self, problem: ExpertsProblem, width: int, native: bool) -> None:
        self._problem, self._width, self._native = problem, width, native
        self._planes = Planes(width) if problem.weights in FOUR_BIT_FORMATS else None
        self._group = _GROUPS.get(problem.activation_dtype)
        if self._group is not None:
            self._block = _AT_ONCE // self._group
            static: dict[str, Any] = {"K": width, "FORMAT": problem.activation_dtype, "GROUP": self._group}
            self._launcher = Launcher(round_kernel, {**static, "BLOCK": self._block}, num_warps=4, num_stages=1)
            return
        piece = BLOCK if problem.activation_groups else width
        padded = triton.next_power_of_2(piece)
        self._block = max(1, _AT_ONCE // padded)
        static = {
            "K": width,
            "WIDTH": piece,
            "WIDTH_PAD": padded,
            "STATIC": problem.static_scales,
            "BLOCK": self._block,
        }
        self._launcher = Launcher(quantize_kernel, static, num_warps=4 if padded <= 4096 else 8, num_stages=1)

    @property
    def pieces(self) -> int:
        """Scales of a row of fp8."""
        return -(-self._width // BLOCK) if self._problem.activation_groups else 1

    def __call__(self, rows: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Rows in the product's format, and their scales."""
        if self._group is not None:
            rows = self._rounded(rows, scale)
        if self._planes is not None:
            return self._planes(rows), scale
        if self._problem.fp8_activations:
            return self._quantized(rows, scale)
        return rows, None

    def bytes_of(self, rows: int) -> int:
        """Bytes of so many rows."""
        problem = self._problem
        item = getattr(torch, problem.dtype).itemsize
        values = rows * self._width * item * ((self._planes is not None) + (self._group is not None))
        return int(values + (rows * (self._width + 4 * self.pieces) if problem.fp8_activations else 0))

    def _rounded(self, rows: Tensor, scale: Tensor | None) -> Tensor:
        assert self._group is not None
        count, groups = rows.shape[0], -(-self._width // self._group)
        out = rows.new_empty((count, self._width), dtype=getattr(torch, self._problem.dtype))
        aligned, of_rows = not rows.data_ptr() & 15, rows.stride()
        self._launcher(
            -(-count * groups // self._block),
            (rows.get_device(), rows.dtype, of_rows) if aligned else None,
            rows,
            scale,
            out,
            count,
            *of_rows,
        )
        return out

    def _quantized(self, rows: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        count, width = rows.shape
        codes = rows.new_empty((count, width), dtype=torch.uint8)
        scales = scale if scale is not None else rows.new_empty(count * self.pieces, dtype=torch.float32)
        aligned, of_rows = not rows.data_ptr() & 15, rows.stride()
        self._launcher(
            -(-count * self.pieces // self._block),
            (rows.get_device(), of_rows) if aligned else None,
            rows,
            scale,
            codes,
            scales,
            count,
            *of_rows,
        )
        return (codes.view(torch.float8_e4m3fn) if self._native else codes), scales


class Join:
    """Gate and up in float32 as codes of what joins them, for `fp8_block_gate_up`."""

    def __init__(self, problem: ExpertsProblem, native: bool) -> None:
        self._width, self._native = problem.intermediate_size, native
        static = {"INNER": self._width, "ACTIVATION": problem.activation, "BLOCK": _JOINED_AT_ONCE}
        self._launcher = Launcher(join_kernel, static, num_warps=4, num_stages=1)

    def __call__(self, both: Tensor, alpha: float, limit: float) -> tuple[Tensor, Tensor]:
        """both [rows, 2I] is contiguous; codes [rows, I], scales [rows, I / 128]."""
        count, pieces = both.shape[0], self._width // BLOCK
        codes = both.new_empty((count, self._width), dtype=torch.uint8)
        scales = both.new_empty((count, pieces))
        programs = -(-count * pieces // _JOINED_AT_ONCE)
        self._launcher(programs, (both.get_device(),), both, codes, scales, count, alpha, limit)
        return (codes.view(torch.float8_e4m3fn) if self._native else codes), scales
