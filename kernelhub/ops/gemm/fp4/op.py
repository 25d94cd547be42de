"""`fp4_gemm`: activations times a float4 weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Ask, Backend, Op
from kernelhub.dispatch.plan import traced_as
from kernelhub.dispatch.publish import publish
from kernelhub.ops.gemm.fp4 import library
from kernelhub.ops.gemm.fp4.adapter import Fp4GemmAdapter
from kernelhub.ops.gemm.fp4.call import bind, form_of, key_of, problem_of, refuse_form, with_layout
from kernelhub.ops.gemm.fp4.operands import check, check_weight
from kernelhub.ops.gemm.fp4.problem import FP4_GEMM, Fp4GemmProblem
from kernelhub.ops.gemm.fp4.reference import fp4_gemm_reference
from kernelhub.ops.packed import PackedWeight, PackingPlan, prepared

_op: Op[Fp4GemmProblem] = Op(
    Contract.of(
        FP4_GEMM,
        problem_of=problem_of,
        adapter=Fp4GemmAdapter,
        bind=bind,
        reference=fp4_gemm_reference,
        example="kernelhub.ops.gemm.fp4.inputs:fp4_gemm_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class Fp4GemmPlan(PackingPlan):
    """A kernel chosen for operands like these.

    ``run(a, b, a_scale=None, b_scale=None, a_global_scale=None, b_global_scale=None, bias=None, out=None)`` is a whole
    call. `pack` gives the weight as the kernel wants it; a plan prepared with that runs it.
    """

    __slots__ = ()

    def __init__(self, bound: Bound) -> None:
        direct, kernel, problem = bound.run, bound.selection.selected, bound.selection.problem
        out_dtype, form = getattr(torch, problem.out_dtype), form_of(problem)

        def run(
            a: Tensor,
            b: Tensor | PackedWeight,
            a_scale: Tensor | None = None,
            b_scale: Tensor | None = None,
            a_global_scale: Tensor | None = None,
            b_global_scale: Tensor | None = None,
            bias: Tensor | None = None,
            out: Tensor | None = None,
        ) -> Tensor:
            try:
                fits = key_of(a, b, a_scale, b_scale, bias, out_dtype) == form
            except (AttributeError, TypeError, ValueError, KeyError):
                check(a, b, a_scale, b_scale, a_global_scale, b_global_scale, bias, out_dtype, out)
                raise
            if not fits:
                check(a, b, a_scale, b_scale, a_global_scale, b_global_scale, bias, out_dtype, out)
                refuse_form(problem, a, b, a_scale, b_scale, bias)
            result: Tensor = direct(a, b, a_scale, b_scale, a_global_scale, b_global_scale, bias, out)
            return result

        def traced(
            a: Tensor,
            b: Tensor | PackedWeight,
            a_scale: Tensor | None = None,
            b_scale: Tensor | None = None,
            a_global_scale: Tensor | None = None,
            b_global_scale: Tensor | None = None,
            bias: Tensor | None = None,
            out: Tensor | None = None,
        ) -> Tensor:
            scales = (a_scale, b_scale, a_global_scale, b_global_scale)
            return fp4_gemm(a, b, *scales, bias, out_dtype, out, kernel)

        super().__init__(bound, traced_as(run, traced))

    def pack(self, b: Tensor, b_scale: Tensor, b_global_scale: Tensor | None = None) -> PackedWeight:
        """The weight in the layout that this plan's kernel reads fastest, for `fp4_gemm` in place of b.

        Args:
            b, b_scale, b_global_scale: as of `fp4_gemm`.

        Raises:
            InvalidArgument: they are no float4 weight.
        """
        form = check_weight(b, b_scale, b_global_scale, None)
        weight = {"codes": b, "scale": b_scale, "global_scale": b_global_scale}
        return self._pack(weight, {"format": form, "scale_dtype": b_scale.dtype})


def _prepare(*args: Any, backend: Backend = None, packing: bool = False, **kwargs: Any) -> Fp4GemmPlan:
    """Choose once for operands like these: arguments as of `fp4_gemm`.

    With `packing` the weight is as in a checkpoint, and the caller packs it with the plan's `pack` before it runs:
    kernels that need that are ranked with the others, and the plan runs what its `pack` gives.
    """
    asked = _op.ask(backend, args, kwargs)

    def make(bound: Bound) -> Fp4GemmPlan:
        plan = Fp4GemmPlan(bound)
        if packing and isinstance(weight := asked.arguments[1], Tensor):
            plan.check_packs(weight, asked.arguments[3], asked.arguments[5])
        return plan

    return prepared(_op, asked, backend, with_layout, packing, make)


@publish(_op, _prepare, traced=library.fp4_gemm)
def fp4_gemm(
    a: Tensor,
    b: Tensor | PackedWeight,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    a_global_scale: Tensor | None = None,
    b_global_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Multiply activations by a float4 weight.

    Args:
        a: ``[..., K]``, bfloat16 or float16; or float8_e4m3fn; or float4, uint8 or float4_e2m1fn_x2 ``[..., K / 2]``.
        b: float4, uint8 or float4_e2m1fn_x2 ``[N, K / 2]``, the first of two in the low four bits; or the weight as
            a plan's `pack` gave it, with its scales.
        a_scale: for float8 a float32 of one element or ``[..., 1]``, or float8_e8m0fnu (or its bytes)
            ``[..., K / 32]`` (MXFP8); for float4 as `b_scale`; None for bfloat16 and float16.
        b_scale: float8_e4m3fn ``[N, K / 16]`` (NVFP4), or float8_e8m0fnu (or its bytes) ``[N, K / 32]`` (MXFP4);
            row by row, not swizzled.
        a_global_scale: float32 of one element, which multiplies, where a is NVFP4.
        b_global_scale: the same, where b is NVFP4.
        bias: ``[N]``, float32 or `out_dtype`.
        out_dtype: bfloat16, float16 or float32.
        out: destination ``[..., N]``; it must not overlap the operands.
        backend: this backend or kernel, or the first of these that can, or an error with all reasons.

    Returns:
        ``[..., N]`` in `out_dtype`, accumulated in float32. Elements of MXFP4 and MXFP8 of 2^128 and more, which no
        float32 holds, count as infinite in some kernels; 0 times such is NaN there.

    Raises:
        InvalidArgument: an argument breaks this contract; the parameter is named.
        NoKernel: no kernel can run this, with the reason of each.

    Source:
        OCP Microscaling Formats (MX) Specification 1.0; the checkpoints of gpt-oss (MXFP4) and ModelOpt (NVFP4).

    Example:
        >>> import torch, kernelhub
        >>> b, scale, factor = kernelhub.quantize_nvfp4(torch.randn(96, 64))
        >>> a = torch.randn(3, 64, dtype=torch.bfloat16)
        >>> kernelhub.fp4_gemm(a, b, b_scale=scale, b_global_scale=factor).shape
        torch.Size([3, 96])
    """
    if type(a) is not Tensor and isinstance(a, Tensor) and not isinstance(backend, Ask):
        scales = (a_scale, b_scale, a_global_scale, b_global_scale)
        return library.fp4_gemm(a, b, *scales, bias, out_dtype, out, backend)
    try:
        key = key_of(a, b, a_scale, b_scale, bias, out_dtype)
        run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    except (AttributeError, TypeError, ValueError, KeyError, RuntimeError):
        check(a, b, a_scale, b_scale, a_global_scale, b_global_scale, bias, out_dtype, out)
        raise
    if run is None:
        check(a, b, a_scale, b_scale, a_global_scale, b_global_scale, bias, out_dtype, out)
        decided = _op.decide(key, a.get_device(), backend)
        fresh: Tensor = decided(a, b, a_scale, b_scale, a_global_scale, b_global_scale, bias, out, True)
        return fresh
    result: Tensor = run(a, b, a_scale, b_scale, a_global_scale, b_global_scale, bias, out)
    return result
