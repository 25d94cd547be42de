"""From calls of the quantisers to their Triton launches."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.operands import as_bytes, strides_of
from kernelhub.backends.triton.quant.dequantize import dequantize_kernel
from kernelhub.backends.triton.quant.quantize import (
    MOST_PARTS,
    MOST_READ,
    STRETCH,
    amax_kernel,
    blocks_kernel,
    given_kernel,
    groups_kernel,
    scale_kernel,
    tokens_kernel,
)
from kernelhub.backends.triton.requirements import has_float8
from kernelhub.ops.quant.adapter import DequantizeAdapter, QuantizeAdapter
from kernelhub.ops.quant.problem import BLOCK, BLOCK_SIZE, GROUP, MX_GROUP, NVFP4_GROUP, TENSOR, TOKEN

if triton.knobs.runtime.interpret:
    interpreter.repair()

# Elements of a program, of 4 warps. On an H200 4096 x 7168 of bfloat16 take 0.034 ms by groups of 128 and 0.079 as
# NVFP4 with 4096, 0.034 and 0.085 with 2048; 8 warps are slower by 2 to 10 %.
_TILE = 4096
_BACK_TILE = 2048
_WARPS = 4
_WIDEST_ROW = 8192  # that a program keeps in registers: 0.032 ms, against 0.037 by two passes of 4096
# A block of 128 x 128 in 0.034 ms; 0.048 with 8 or 16. Without conversions to float8 4 spill 900 bytes on sm_80.
_BLOCK_WARPS = {True: 4, False: 8}
_Maxima = tuple[Tensor | None, int, int]
_KNOWN: _Maxima = (None, 0, 0)  # of a scale that nothing has to be read for
_FEW_STRETCHES = 4  # that each program reads for their maximum, which takes less than a launch


def _variant(columns: int, strides: tuple[int, ...], *tensors: Tensor) -> Any:
    """Equal for launches of one compiled variant; None if an operand is not aligned to 16 bytes."""
    alignment = 0
    for tensor in tensors:
        alignment |= tensor.data_ptr()
    return None if alignment & 15 else (tensors[0].get_device(), strides, columns == 1, columns % 16 == 0)


def _matrix_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of [B, M, K], or of [M, K] as a single matrix. Those of one say nothing of the number of its rows."""
    strides = tensor.stride()
    return strides if len(strides) == 3 and tensor.shape[0] > 1 else (0, *strides[-2:])


def _groups(group: int, tile: int = _TILE) -> dict[str, int]:
    padded = triton.next_power_of_2(group)
    return {"GROUP": group, "GROUP_PAD": padded, "GROUPS": max(1, tile // padded)}


def _arithmetic(problem: Any) -> dict[str, bool]:
    """What the device has: fused multiply-adds, which the interpreter rounds twice, and conversions to float8.

    sm_89 has those too, but Triton 3.6 goes by float16 there and rounds twice.
    """
    device = problem.device
    native = device.vendor == "nvidia" and device.capability >= (9, 0)
    return {"FUSED": device.vendor != "cpu", "NATIVE": native}


class _Amax:
    """The largest magnitude of a tensor, for its scale: in the launch that encodes, or in one or two before it."""

    def __init__(self, largest: float, nvfp4: bool, ue8m0: bool, e8m0: bool) -> None:
        self._amax = Launcher(amax_kernel, {"LARGEST": largest}, num_warps=_WARPS)
        static = {"NVFP4": nvfp4, "UE8M0": ue8m0, "E8M0": e8m0}
        self._scale = Launcher(scale_kernel, static, num_warps=_WARPS)

    def __call__(self, x: Tensor, scale: Tensor) -> _Maxima:
        """Of x [M, K] and its scale of one element what the launch that encodes takes: maxima, stretches, parts."""
        rows, columns = x.shape
        units = rows * -(-columns // STRETCH)
        if units <= _FEW_STRETCHES:
            return self._none(x, scale), units, 0
        parts = min(units, MOST_PARTS)
        maxima = x.new_empty(MOST_PARTS, dtype=torch.float32)
        self._amax(parts, _variant(columns, x.stride(), x), x, maxima, columns, units, *x.stride(), parts)
        if units <= MOST_READ:
            return maxima, units, parts
        self._scale(1, scale.get_device(), maxima, scale, parts)
        return maxima, units, -1

    @staticmethod
    def _none(x: Tensor, scale: Tensor) -> Tensor:
        """In place of maxima, float32 as they are: one compiled variant serves all sizes."""
        return scale if scale.dtype is torch.float32 else x.new_empty(1, dtype=torch.float32)


class _Rows:
    """Kernels of rows of some widths: up to `_WIDEST_ROW` a program keeps a row."""

    def __init__(self, static: dict[str, Any]) -> None:
        self._static = static
        self._launchers: dict[int, Launcher] = {}

    def launcher(self, columns: int) -> Launcher:
        block = min(max(triton.next_power_of_2(columns), 1024), 2 * _WIDEST_ROW)
        made = self._launchers.get(block)
        if made is None:
            whole = block <= _WIDEST_ROW
            static = {**self._static, "BLOCK": block if whole else 4096, "WHOLE": whole}
            made = self._launchers[block] = Launcher(tokens_kernel, static, num_warps=max(4, min(8, block // 1024)))
        return made


class QuantizeFp8(QuantizeAdapter):
    """`quantize_fp8`: one launch, or up to three where a tensor's own maximum gives its scale."""

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        largest = torch.finfo(getattr(torch, problem.dtype)).max
        e8m0 = problem.scale_dtype == "float8_e8m0fnu"
        static: dict[str, Any] = {"UE8M0": problem.ue8m0, "E8M0": e8m0, "LARGEST": largest}
        static |= _arithmetic(problem)
        self._repeated = Repeated()
        self._given = problem.static or problem.granularity == TENSOR
        if self._given:
            given = {**static, "BLOCK": _TILE, "OWN": not problem.static}
            self._launch = Launcher(given_kernel, given, num_warps=_WARPS)
            self._amax = None if problem.static else _Amax(largest, False, problem.ue8m0, e8m0)
        elif problem.granularity == TOKEN:
            self._rows = _Rows(static)
        elif problem.granularity == BLOCK:
            self._launch = Launcher(
                blocks_kernel, {**static, "SIZE": BLOCK_SIZE}, num_warps=_BLOCK_WARPS[static["NATIVE"]]
            )
        else:
            static |= {"FORMAT": "fp8", "ROUND_UP": False, "OWN": False, **_groups(problem.group_size)}
            self._launch = Launcher(groups_kernel, static, num_warps=_WARPS)
            self._columns: int = problem.group_size * static["GROUPS"]

    def workspace_bytes(self, **sizes: int) -> int:
        """Partial maxima."""
        return 4 * MOST_PARTS if self._given and not self.problem.static else 0

    def launch(self, x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> None:
        tensors = (x, codes, scale) if global_scale is None else (x, codes, scale, global_scale)
        self._repeated.run(x.shape, tensors, self._launch_anew, x, codes, scale, global_scale)

    def repeated(self, x: Tensor, *more: Tensor | None) -> Any:
        return self._repeated.sequence_of(x.shape, [x, *(one for one in more if one is not None)])

    def _launch_anew(self, x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> None:
        granularity = self.problem.granularity
        codes, scale = as_bytes(codes), as_bytes(scale)
        with on_device_of(x):
            if granularity == BLOCK:
                matrices, rows, columns = x.shape
                blocks = matrices * -(-rows // BLOCK_SIZE) * -(-columns // BLOCK_SIZE)
                strides = (*_matrix_strides(x), *_matrix_strides(codes))
                variant = _variant(columns, strides, x, codes)
                self._launch(blocks, variant, x, codes, scale, rows, columns, *strides, *scale.stride())
                return
            rows, columns = x.shape
            strides = (*x.stride(), *codes.stride())
            variant = _variant(columns, strides, x, codes)
            if self._given:
                maxima = _KNOWN if self._amax is None else self._amax(x, scale)
                chunks = rows * -(-columns // _TILE)
                step = 0 if scale.numel() == 1 else scale.stride(0)
                self._launch(chunks, variant, x, codes, scale, *maxima, rows, columns, *strides, step)
            elif granularity == TOKEN:
                self._rows.launcher(columns)(rows, variant, x, codes, scale, rows, columns, *strides, scale.stride(0))
            else:
                programs = rows * -(-columns // self._columns)
                more = (rows, columns, *strides, *scale.stride())
                self._launch(programs, variant, x, codes, scale, None, *_KNOWN, *more)


class _QuantizeGroups(QuantizeAdapter):
    """A format whose groups are fixed."""

    format = ""
    group = MX_GROUP

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        self._repeated = Repeated()
        self._largest = torch.finfo(getattr(torch, problem.dtype)).max
        static: dict[str, Any] = {"FORMAT": self.format, "UE8M0": False, "E8M0": False, "LARGEST": self._largest}
        static |= _arithmetic(problem)
        static |= {"ROUND_UP": getattr(problem, "round_up", False), **_groups(self.group)}
        static["OWN"] = not getattr(problem, "static", True)
        self._per_program: int = static["GROUPS"]
        self._launch = Launcher(groups_kernel, static, num_warps=_WARPS)

    def launch(self, x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> None:
        tensors = (x, codes, scale) if global_scale is None else (x, codes, scale, global_scale)
        self._repeated.run(x.shape, tensors, self._launch_anew, x, codes, scale, global_scale)

    def repeated(self, x: Tensor, *more: Tensor | None) -> Any:
        return self._repeated.sequence_of(x.shape, [x, *(one for one in more if one is not None)])

    def _launch_anew(self, x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> None:
        codes, scale = as_bytes(codes), as_bytes(scale)
        rows, columns = x.shape
        programs = rows * -(-columns // (self.group * self._per_program))
        strides = (*x.stride(), *codes.stride())
        variant = _variant(columns, strides, x, codes)
        with on_device_of(x):
            maxima = self._maxima(x, global_scale)
            more = (rows, columns, *strides, *scale.stride())
            self._launch(programs, variant, x, codes, scale, global_scale, *maxima, *more)

    def _maxima(self, x: Tensor, global_scale: Tensor | None) -> _Maxima:
        """For a global scale that is not known."""
        return _KNOWN


class QuantizeMxfp4(_QuantizeGroups):
    """`quantize_mxfp4` in one launch."""

    format = "mxfp4"


class QuantizeMxfp8(_QuantizeGroups):
    """`quantize_mxfp8` in one launch."""

    format = "mxfp8"


class QuantizeNvfp4(_QuantizeGroups):
    """`quantize_nvfp4`: one launch, or up to three where the tensor's own maximum gives the global scale."""

    format = "nvfp4"
    group = NVFP4_GROUP

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        self._amax = None if problem.static else _Amax(self._largest, True, False, False)

    def workspace_bytes(self, **sizes: int) -> int:
        """Partial maxima."""
        return 0 if self._amax is None else 4 * MOST_PARTS

    def _maxima(self, x: Tensor, global_scale: Tensor | None) -> _Maxima:
        assert global_scale is not None
        return _KNOWN if self._amax is None else self._amax(x, global_scale)


class _Dequantize(DequantizeAdapter):
    """A dequantiser: one launch."""

    fp4 = False
    scale = "e8m0"
    group = MX_GROUP
    scale_rows = 1

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        device = problem.device
        static: dict[str, Any] = {
            "FP4": self.fp4,
            "SCALE": self.scale,
            "HAS_GLOBAL": self.scale == "e4m3",
            "NATIVE": has_float8(device),
            **_groups(self.group, _BACK_TILE),
        }
        self._repeated = Repeated()
        self._tile = self.group * static["GROUPS"]
        self._launch = Launcher(dequantize_kernel, static, num_warps=_WARPS)

    def launch(self, codes: Tensor, scale: Tensor, global_scale: Tensor | None, out: Tensor) -> None:
        tensors = (codes, scale, out) if global_scale is None else (codes, scale, out, global_scale)
        self._repeated.run(out.shape, tensors, self._launch_anew, codes, scale, global_scale, out)

    def repeated(self, codes: Tensor, scale: Tensor, global_scale: Tensor | None, out: Tensor) -> Any:
        tensors = (codes, scale, out) if global_scale is None else (codes, scale, out, global_scale)
        return self._repeated.sequence_of(out.shape, tensors)

    def _launch_anew(self, codes: Tensor, scale: Tensor, global_scale: Tensor | None, out: Tensor) -> None:
        codes, scale = as_bytes(codes), as_bytes(scale)
        rows, columns = out.shape[-2:]
        matrices = out.shape[0] if out.ndim == 3 else 1
        by_matrix, by_row, by_column = strides_of(scale, 3)
        if self.group == _BACK_TILE:  # a row's or the tensor's own scale
            by_matrix, by_row, by_column = 0, 0 if scale.numel() == 1 else by_row, 0
        strides = (*_matrix_strides(codes), *_matrix_strides(out))
        variant = _variant(columns, strides, codes, out)
        programs = matrices * rows * -(-columns // self._tile)
        with on_device_of(out):
            self._launch(
                programs,
                variant,
                codes,
                scale,
                global_scale,
                out,
                rows,
                columns,
                *strides,
                by_matrix,
                by_row,
                by_column,
                self.scale_rows,
            )


class DequantizeMxfp8(_Dequantize):
    """`dequantize_mxfp8`."""


class DequantizeMxfp4(_Dequantize):
    """`dequantize_mxfp4`."""

    fp4 = True


class DequantizeNvfp4(_Dequantize):
    """`dequantize_nvfp4`."""

    fp4 = True
    scale = "e4m3"
    group = NVFP4_GROUP


class DequantizeFp8(_Dequantize):
    """`dequantize_fp8`."""

    def __init__(self, problem: Any) -> None:
        self.scale = "float32" if problem.scale_dtype == "float32" else "e8m0"
        self.group = {GROUP: problem.group_size, BLOCK: BLOCK_SIZE}.get(problem.granularity, _BACK_TILE)
        self.scale_rows = BLOCK_SIZE if problem.granularity == BLOCK else 1
        super().__init__(problem)
