"""From calls of `rms_norm_quant` and `silu_and_mul_quant` to their Triton launches."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.fused_quant.rows import activation_kernel, norm_kernel
from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.operands import as_bytes
from kernelhub.ops.fused_quant.adapter import ActivationAdapter, NormAdapter
from kernelhub.ops.fused_quant.problem import FP8_TOKEN, ActivationProblem, FusedProblem, NormProblem

if triton.knobs.runtime.interpret:
    interpreter.repair()

_WIDEST_ROW = 8192  # that a program keeps in registers
_PART = 4096  # of a wider row
_STRETCH = 2048  # of a row without a scale of its own


def _static(problem: FusedProblem, block: int, whole: bool) -> dict[str, Any]:
    return {"COLUMNS": problem.width, "BLOCK": block, "WHOLE": whole, **static_form(problem)}


def static_form(problem: Any) -> dict[str, Any]:
    """Static arguments that the form of the result decides. `problem` has the facets of form of a `FusedProblem`."""
    device = problem.device
    return {
        "FORMAT": problem.format,
        "UE8M0": problem.ue8m0,
        "E8M0": problem.scale_dtype == "float8_e8m0fnu",
        "LARGEST": torch.finfo(getattr(torch, problem.dtype)).max,
        "FUSED": device.vendor != "cpu",  # the interpreter rounds a fused multiply-add twice
        # sm_89 converts to float8 too, but Triton 3.6 goes by float16 there and rounds twice.
        "NATIVE": device.vendor == "nvidia" and device.capability >= (9, 0),
    }


def _block_of(width: int) -> tuple[int, bool]:
    """Elements of a tile, and whether it is a row."""
    block = max(1024, triton.next_power_of_2(width))
    return (block, True) if block <= _WIDEST_ROW else (_PART, False)


def _warps(block: int) -> int:
    return max(4, min(8, block // 1024))


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


class Norm(NormAdapter):
    """A program for each row."""

    def __init__(self, problem: NormProblem) -> None:
        super().__init__(problem)
        block, whole = _block_of(problem.width)
        static = _static(problem, block, whole)
        static |= {"HAS_RESIDUAL": problem.residual, "UNIT_OFFSET": problem.unit_offset}
        self._repeated = Repeated()
        self._launch = Launcher(norm_kernel, static, num_warps=_warps(block))

    def launch(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None,
        given_scale: Tensor | None,
        out: Tensor,
        scale: Tensor | None,
        residual_out: Tensor | None,
    ) -> None:
        given = (x, weight, eps, residual, given_scale, out, scale, residual_out)
        tensors = [tensor for tensor in given if isinstance(tensor, Tensor)]
        self._repeated.run((x.shape[0], eps), tensors, self._launch_anew, *given)

    def repeated(self, x: Tensor, weight: Tensor, eps: float, *more: Tensor | None) -> Any:
        tensors = [tensor for tensor in (x, weight, *more) if tensor is not None]
        return self._repeated.sequence_of((x.shape[0], eps), tensors)

    def _launch_anew(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None,
        given_scale: Tensor | None,
        out: Tensor,
        scale: Tensor | None,
        residual_out: Tensor | None,
    ) -> None:
        out, scale = as_bytes(out), None if scale is None else as_bytes(scale)
        strides = (*x.stride(), *weight.stride(), *_strides(residual), *_strides(out))
        sums = _strides(residual_out)
        address = x.data_ptr() | weight.data_ptr() | out.data_ptr()
        for tensor in (residual, residual_out):
            address |= 0 if tensor is None else tensor.data_ptr()
        with on_device_of(x):
            self._launch(
                x.shape[0],
                None if address & 15 else (x.get_device(), strides, sums),
                x,
                weight,
                residual,
                given_scale,
                out,
                scale,
                residual_out,
                eps,
                *strides,
                *_strides(scale),
                *sums,
            )


class Activation(ActivationAdapter):
    """A program for each row, or for each stretch of a row."""

    def __init__(self, problem: ActivationProblem) -> None:
        super().__init__(problem)
        block, whole = _block_of(problem.width)
        self._chunks = 1
        if problem.format != FP8_TOKEN:
            block = min(_STRETCH, block)
            self._chunks = -(-problem.width // block)
        self._repeated = Repeated()
        self._launch = Launcher(activation_kernel, _static(problem, block, whole), num_warps=_warps(block))

    def launch(self, x: Tensor, given_scale: Tensor | None, out: Tensor, scale: Tensor | None) -> None:
        given = (x, given_scale, out, scale)
        tensors = [tensor for tensor in given if tensor is not None]
        self._repeated.run(x.shape[0], tensors, self._launch_anew, *given)

    def repeated(self, x: Tensor, *more: Tensor | None) -> Any:
        return self._repeated.sequence_of(x.shape[0], [x, *(tensor for tensor in more if tensor is not None)])

    def _launch_anew(self, x: Tensor, given_scale: Tensor | None, out: Tensor, scale: Tensor | None) -> None:
        out, scale = as_bytes(out), None if scale is None else as_bytes(scale)
        strides = (*x.stride(), *out.stride())
        with on_device_of(x):
            self._launch(
                x.shape[0] * self._chunks,
                None if (x.data_ptr() | out.data_ptr()) & 15 else (x.get_device(), strides),
                x,
                given_scale,
                out,
                scale,
                *strides,
                *_strides(scale),
            )
