"""`fp4_gemm` by Marlin, of weights that were packed for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from kernelhub.backends.marlin.kernels import SCHEMA, VLLM
from kernelhub.backends.marlin.locks import Locks
from kernelhub.backends.marlin.order import ordered_codes, ordered_scales, padded_rows, plain_codes, plain_scales
from kernelhub.backends.marlin.scales import (
    Unfit,
    check_global_scale,
    check_mxfp4_scales,
    e4m3_scales,
    exponent_left,
    nvfp4_scales,
)
from kernelhub.backends.shared.operands import is_row_major, row_major
from kernelhub.backends.shared.operators import operator
from kernelhub.errors import InvalidArgument
from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.gemm.fp4.adapter import Activations, Fp4GemmAdapter, Weights
from kernelhub.ops.gemm.fp4.problem import NVFP4, Fp4GemmProblem
from kernelhub.ops.packed import PackedWeight, PackingAdapter, Tensors

# Of vLLM's scalar types (vllm/scalar_type.py) e2m1: bits of exponent and of mantissa, signed, finite only.
E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49


class MarlinFp4(Fp4GemmAdapter, PackingAdapter):
    """Rows of b are filled up to whole tiles with zeros when it is packed; the result is cut off by a copy."""

    def __init__(self, problem: Fp4GemmProblem) -> None:
        super().__init__(problem)
        self._multiply = operator(VLLM, "marlin_gemm", SCHEMA, problem.device.capability)
        self._locks = Locks()
        self._rows_of_b = padded_rows(problem.n, problem.k)
        self._scale_dtype = E4M3 if problem.b_format == NVFP4 else E8M0

    def launch(self, a: Activations, b: Weights, bias: Tensor | None, out: Tensor) -> None:
        m, n = out.shape
        direct = n == self._rows_of_b and is_row_major(out)
        made = row_major(out) if direct else out.new_empty((m, self._rows_of_b))
        scale = b.scale if b.scale.dtype is self._scale_dtype else b.scale.view(self._scale_dtype)
        self._multiply(
            row_major(a.codes),
            made,
            b.codes.view(torch.int32),
            None,  # bias, which it would add after rounding
            scale,
            None,
            b.global_scale,
            None,
            self._locks.on(out.device),
            E2M1,
            m,
            self._rows_of_b,
            self.problem.k,
            False,  # no atomic sums, whose order is not fixed
            True,  # partial sums in float32
            False,
        )
        if not direct:
            out.copy_(made[:, :n])

    def pack(self, *weight: Tensor | None) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        """Codes and scales in Marlin's order, after a check that its format represents them."""
        codes, _, global_scale = weight
        assert codes is not None
        raw = codes.view(torch.uint8).contiguous()
        more = padded_rows(raw.shape[0], 2 * raw.shape[1]) - raw.shape[0]
        made, shift, exponent = self._held(*weight)
        shape = None if global_scale is None else tuple(global_scale.shape)
        if global_scale is not None:
            global_scale = (global_scale.double() * 2.0**exponent).float().reshape(1)
        pad = functools.partial(torch.nn.functional.pad, pad=(0, 0, 0, more))
        tensors = {
            "codes": ordered_codes(pad(raw)).view(torch.uint8),
            "scale": ordered_scales(pad(made)).view(self._scale_dtype),
            "global_scale": global_scale,
        }
        return tensors, functools.partial(unpack, shift=shift, exponent=exponent, shape=shape)

    def check_holds(self, *weight: Tensor | None) -> None:
        """Check that Marlin's format can represent the scales."""
        self._held(*weight)

    def _held(self, *weight: Tensor | None) -> tuple[Tensor, int, int]:
        """Scales as Marlin reads them, in their place, and the powers of two that they and the global one moved by."""
        codes, scale, global_scale = weight
        assert codes is not None
        assert scale is not None
        raw = codes.view(torch.uint8).contiguous()
        n, groups = scale.shape
        used = (raw & 0x77).view(n, groups, -1).amax(-1) != 0
        exponent = shift = 0
        try:
            if global_scale is None:
                made = scale.view(torch.uint8)
                check_mxfp4_scales(made, used)
            else:
                made, shift = nvfp4_scales(scale, used, self.problem.a_format)
                exponent = exponent_left(self.problem.a_format, shift)
        except Unfit as unfit:
            _refuse("b_scale", unfit)
        if global_scale is not None:
            try:
                check_global_scale(float(global_scale), exponent)
            except Unfit as unfit:
                _refuse("b_global_scale", unfit)
        return made, shift, exponent


def unpack(packed: PackedWeight, *, shift: int, exponent: int, shape: tuple[int, ...] | None) -> Tensors:
    """The inverse of `pack`: codes, scale and global scale."""
    codes, scale, global_scale = (packed.tensors[name] for name in ("codes", "scale", "global_scale"))
    assert codes is not None
    assert scale is not None
    n = packed.shape[0]
    back = plain_codes(codes.view(torch.int32))[:n].view(packed.dtype)
    raw = plain_scales(scale.view(torch.uint8))[:n].contiguous()
    if global_scale is None:
        return back, raw.view(packed.facts["scale_dtype"]), None
    assert shape is not None
    return back, e4m3_scales(raw, shift), (global_scale.double() * 2.0**-exponent).float().reshape(shape)


def _refuse(parameter: str, unfit: Unfit) -> NoReturn:
    fix = "prepare a plan with another kernel, such as backend='triton', which supports every weight"
    raise InvalidArgument("fp4_gemm", parameter, str(unfit), fix) from unfit
