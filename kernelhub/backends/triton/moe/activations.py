"""Launches what brings activations into the form that the products of `triton.experts` take."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.moe.quantize import quantize_kernel
from kernelhub.backends.triton.moe.rounding import join_kernel, round_kernel
from kernelhub.backends.triton.planes import BLOCK as PLANES_AT_ONCE
from kernelhub.backends.triton.planes import Planes
from kernelhub.ops.moe.experts.activations import MX_GROUP, NVFP4_GROUP
from kernelhub.ops.moe.experts.problem import FOUR_BIT_FORMATS, MXFP8, NVFP4, ExpertsProblem
from kernelhub.ops.moe.experts.weights import BLOCK

_GROUPS = {MXFP8: MX_GROUP, NVFP4: NVFP4_GROUP}
_AT_ONCE = 2048  # elements of a program
_JOINED_AT_ONCE = 8  # times 128 columns of gate and up
_WARPS = 4
_WIDEST = 4096  # columns of a piece that four warps hold
NO_FORM: dict[str, Any] = {"FORM": "", "K": 1, "WIDTH": 1, "WIDTH_PAD": 1, "STATIC": False, "ROWS": 1}


class Formed(NamedTuple):
    """Rows in the product's format, which another launch makes along with what it is for.

    Attributes:
        programs: that it takes.
        variant: what its compiled variant depends on; None if that is not known.
        operands: the rows, their scale if one is given, what they become, and the scales of that.
        sizes: the number of rows, and their strides.
        made: what they become, and its scales, as `Activations` gives them; None of `NOTHING`.
    """

    programs: int
    variant: Hashable | None
    operands: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    sizes: tuple[int, ...]
    made: tuple[Tensor, Tensor | None] | None


NOTHING = Formed(0, (), (None, None, None, None), (0, 0, 0), None)


class Activations:
    """Rows of one width of a problem: as they are, as codes of fp8, as values of a format, as planes."""

    def __init__(self, problem: ExpertsProblem, width: int, native: bool) -> None:
        self._problem, self._width, self._native = problem, width, native
        self._planes = Planes(width) if problem.weights in FOUR_BIT_FORMATS else None
        self._group = _GROUPS.get(problem.activation_dtype)
        if self._group is not None:
            self._block = _AT_ONCE // self._group
            static: dict[str, Any] = {"K": width, "FORMAT": problem.activation_dtype, "GROUP": self._group}
            self._launcher = Launcher(round_kernel, {**static, "BLOCK": self._block}, num_warps=_WARPS, num_stages=1)
            self.form = NO_FORM
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
        warps = _WARPS if padded <= _WIDEST else 8
        self._launcher = Launcher(quantize_kernel, static, num_warps=warps, num_stages=1)
        self.form = self._form(static)

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

    def formed(self, rows: Tensor, scale: Tensor | None) -> Formed:
        """The same of rows [rows, width] by another launch of four warps, which has `form` among its static arguments.

        What no other launch makes is made at once.
        """
        count, of_rows, form = rows.shape[0], rows.stride(), self.form["FORM"]
        if not form:
            return NOTHING._replace(made=self(rows, scale))
        variant = (rows.dtype, of_rows) if not rows.data_ptr() & 15 else None
        sizes = (count, *of_rows)
        if form == "planes":
            planes = rows.new_empty((count, self._width))
            programs = count * -(-self._width // (4 * PLANES_AT_ONCE))
            return Formed(programs, variant, (rows, None, planes, None), sizes, (planes, scale))
        codes, scales = self._memory(rows, scale)
        made = codes.view(torch.float8_e4m3fn) if self._native else codes
        programs = -(-count * self.pieces // self._block)
        return Formed(programs, variant, (rows, scale, codes, scales), sizes, (made, scales))

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
        count = rows.shape[0]
        codes, scales = self._memory(rows, scale)
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

    def _memory(self, rows: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """For codes, and for scales or those that are given."""
        codes = rows.new_empty(rows.shape, dtype=torch.uint8)
        scales = scale if scale is not None else rows.new_empty(rows.shape[0] * self.pieces, dtype=torch.float32)
        return codes, scales

    def _form(self, static: dict[str, Any]) -> dict[str, Any]:
        """Static arguments of a launch that makes the form, too; `static` are those of codes."""
        if self._planes is not None and self._width % 4 == 0:
            of_planes = {"FORM": "planes", "K": self._width, "WIDTH": PLANES_AT_ONCE}
            return NO_FORM | of_planes
        if self._planes is None and self._problem.fp8_activations and static["WIDTH_PAD"] <= _WIDEST:
            named = {name: value for name, value in static.items() if name != "BLOCK"}
            return {"FORM": "codes", **named, "ROWS": self._block}
        return NO_FORM


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
