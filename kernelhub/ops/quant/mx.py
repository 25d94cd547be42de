"""The MX formats, a power of two for 32 elements: `quantize_mxfp4`, `quantize_mxfp8` and the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract, OpRecord
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.ops.arguments import dense, dtype_name, refuse, usable
from kernelhub.ops.call_plan import CallPlan, Fixed, prepares
from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.operands import check_loose, check_operand, transformed
from kernelhub.ops.operators import Traced
from kernelhub.ops.quant.adapter import DequantizeAdapter, QuantizeAdapter
from kernelhub.ops.quant.arguments import (
    any_rows,
    as_rows,
    check_x,
    dequantized,
    dequantized_fp4,
    destination,
    shape_of,
)
from kernelhub.ops.quant.dequantize_call import bind_dequantize, check_dequantize, dequantize_problem
from kernelhub.ops.quant.problem import (
    DEQUANTIZE_MXFP4,
    DEQUANTIZE_MXFP8,
    MX_GROUP,
    QUANTIZE_MXFP4,
    QUANTIZE_MXFP8,
    DequantizeProblem,
    QuantizeMxProblem,
)
from kernelhub.ops.quant.reference import (
    dequantize_mxfp4_reference,
    dequantize_mxfp8_reference,
    quantize_mxfp4_reference,
    quantize_mxfp8_reference,
)
from kernelhub.probes.device import facts_of

Run = Callable[..., Any]
ROUNDINGS = ("floor", "up")


def mx_problem(key: Any, device: int) -> QuantizeMxProblem:
    """The problem that a key means; the key is built in `quantize_mxfp4` and `quantize_mxfp8`."""
    dtype, round_up = key
    return QuantizeMxProblem(facts_of(device), dtype_name(dtype), round_up)


def check_mx(op: str, x: Any, scale_rounding: Any) -> None:
    """Everything that the contract says of a call but its destinations."""
    if scale_rounding not in ROUNDINGS:
        refuse(op, "scale_rounding", f"is {scale_rounding!r}", "give 'floor' or 'up'")
    check_x(op, x, MX_GROUP if op == "quantize_mxfp4" else 1)


def check_mx_destinations(op: str, x: Tensor, out: Any, out_scale: Any) -> None:
    """The destinations that a plan is prepared with."""
    (*lead, width), device = x.shape, x.get_device()
    shape, dtype = ((*lead, width // 2), torch.uint8) if op == "quantize_mxfp4" else (x.shape, E4M3)
    if out is not None:
        destination(op, "out", out, shape, dtype, device, ("x",), (x,))
    if out_scale is not None:
        scales = (*lead, -(-width // MX_GROUP))
        destination(op, "out_scale", out_scale, scales, E8M0, device, ("x", "out"), (x, out))


def bind_mx(op: str) -> Callable[..., Run]:
    """The function that binds a kernel of `quantize_mxfp4` or `quantize_mxfp8`."""
    fp4 = op == "quantize_mxfp4"

    def bind(
        adapter: Any, problem: QuantizeMxProblem, device: int, tick: Callable[[], int], elsewhere: Callable[[int], Run]
    ) -> Run:
        launch, dtype = adapter.launch, getattr(torch, problem.dtype)
        multiple, per_byte, codes_dtype = (MX_GROUP, 2, torch.uint8) if fp4 else (1, 1, E4M3)

        calls, repeats = KnownCalls(adapter.launch), is_repeated(adapter)
        recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds

        def check_operand_of_call(x: Tensor, shape: tuple[int, ...]) -> None:
            """Whatever the contract says of x."""
            known = usable(x, dtype, device) and shape and shape[-1] and not shape[-1] % multiple
            if transformed() or not known:
                check_mx(op, x, "floor")
                if x.dtype is not dtype:
                    refuse(op, "x", f"has dtype {dtype_name(x.dtype)}", f"the plan is for {problem.dtype}")
            else:
                check_loose(op, ("x",), (x,))
                if shape[-1] == 1 and x.is_neg():  # one element is contiguous whatever it is a view of
                    check_operand(op, "x", x)

        def run(x: Tensor, out: Tensor | None, out_scale: Tensor | None) -> tuple[Tensor, Tensor]:
            if x.get_device() != device:
                result: tuple[Tensor, Tensor] = elsewhere(x.get_device())(x, out, out_scale)
                return result
            shape = shape_of(op, x)
            state = 0
            *lead, width = shape if shape else (0,)
            scales = (*lead, -(-width // MX_GROUP))
            if shape in calls and dense(x, dtype, device):
                codes = x.new_empty(*lead, width // per_byte, dtype=codes_dtype) if out is None else out
                scale = x.new_empty(*scales, dtype=E8M0) if out_scale is None else out_scale
                state = recognise(shape, (x, codes, scale))
                if state:
                    out, out_scale = codes, scale
                    if state == 2:
                        tick()
                        return out, out_scale
            if not state:
                check_operand_of_call(x, shape)
                out = destination(op, "out", out, (*lead, width // per_byte), codes_dtype, device, ("x",), (x,))
                out_scale = destination(op, "out_scale", out_scale, scales, E8M0, device, ("x", "out"), (x, out))
                calls.learn(shape, (x, out, out_scale), 2)
            assert out is not None
            assert out_scale is not None
            if x.numel():
                rows = as_rows(op, "out", out, False), as_rows(op, "out_scale", out_scale, False)
                launched = any_rows(x, False), *rows, None
                tick()
                try:
                    launch(*launched)
                except Exception as error:
                    failed(launch, error)
                    raise
                if state and repeats:
                    calls.attach(shape, (x, out, out_scale), adapter.repeated, *launched)
            return out, out_scale

        return run

    return bind


_EXAMPLE = "kernelhub.ops.quant.inputs:quantize_inputs"


def quantizer(record: OpRecord[QuantizeMxProblem], reference: Callable[..., Any]) -> Op[QuantizeMxProblem]:
    """The op of a quantiser."""
    return Op(
        Contract.of(
            record,
            problem_of=mx_problem,
            adapter=QuantizeAdapter,
            bind=bind_mx(record.name),
            reference=reference,
            example=_EXAMPLE,
        )
    )


def dequantizer(record: OpRecord[DequantizeProblem], reference: Callable[..., Any]) -> Op[DequantizeProblem]:
    """The op of the way back."""
    return Op(
        Contract.of(
            record,
            problem_of=dequantize_problem,
            adapter=DequantizeAdapter,
            bind=bind_dequantize(record.name),
            reference=reference,
            example=_EXAMPLE,
        )
    )


class QuantizeMxPlan(CallPlan):
    """A kernel selected for tensors like this: ``run(x, out=None, out_scale=None)`` is a whole call."""

    __slots__ = ()
    call = "x, out, out_scale"
    fixed: ClassVar[Fixed] = {"scale_rounding": lambda problem: "up" if problem.round_up else "floor"}


class DequantizeMxPlan(CallPlan):
    """A kernel selected for codes like these: ``run(x, scale, out=None)`` is a whole call."""

    __slots__ = ()
    call = "x, scale, None, out"
    fixed: ClassVar[Fixed] = {"out_dtype": lambda problem: getattr(torch, problem.out_dtype)}


_quantize_mxfp4 = quantizer(QUANTIZE_MXFP4, quantize_mxfp4_reference)
_dequantize_mxfp4 = dequantizer(DEQUANTIZE_MXFP4, dequantize_mxfp4_reference)
_quantize_mxfp8 = quantizer(QUANTIZE_MXFP8, quantize_mxfp8_reference)
_dequantize_mxfp8 = dequantizer(DEQUANTIZE_MXFP8, dequantize_mxfp8_reference)
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


def _memory_fp4(x: Tensor, **others: Any) -> dict[str, Tensor]:
    return _memory(x, x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8))


def _memory_fp8(x: Tensor, **others: Any) -> dict[str, Tensor]:
    return _memory(x, x.new_empty(x.shape, dtype=E4M3))


def _memory(x: Tensor, codes: Tensor) -> dict[str, Tensor]:
    *lead, width = x.shape
    return {"out": codes, "out_scale": x.new_empty((*lead, -(-width // MX_GROUP)), dtype=E8M0)}


def _quantized(
    op: Op[QuantizeMxProblem],
    x: Tensor,
    scale_rounding: str,
    out: Tensor | None,
    out_scale: Tensor | None,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor]
    if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, DryRun):
        result = op.traced(x, scale_rounding, out, out_scale, backend)
        return result
    try:
        if scale_rounding not in ROUNDINGS:
            raise ValueError(scale_rounding)
        key = (x.dtype, scale_rounding == "up")
    except (AttributeError, TypeError, ValueError, RuntimeError):
        check_mx(op.contract.name, x, scale_rounding)
        raise
    run = op.table.get(key) if backend is None and not (_contexts_used and _contexts()) else op.override(key, backend)
    if run is None:
        check_mx(op.contract.name, x, scale_rounding)
        if isinstance(backend, DryRun):
            check_mx_destinations(op.contract.name, x, out, out_scale)
        run = op.decide(key, x.get_device(), backend)
    result = run(x, out, out_scale)
    return result


def _dequantized(
    op: Op[DequantizeProblem],
    x: Tensor,
    scale: Tensor,
    out_dtype: torch.dtype,
    out: Tensor | None,
    backend: Backend,
) -> Tensor:
    result: Tensor
    if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, DryRun):
        result = op.traced(x, scale, out_dtype, out, backend)
        return result
    try:
        key = (out_dtype, x.ndim > 0)
        hash(key)
    except (AttributeError, TypeError, RuntimeError):
        check_dequantize(op.contract.name, x, scale, None, out_dtype)
        raise
    run = op.table.get(key) if backend is None and not (_contexts_used and _contexts()) else op.override(key, backend)
    if run is None:
        check_dequantize(op.contract.name, x, scale, None, out_dtype)
        run = op.decide(key, x.get_device(), backend)
    result = run(x, scale, None, out)
    return result


@publish(_quantize_mxfp4, prepares(_quantize_mxfp4, QuantizeMxPlan), traced=Traced(_memory_fp4, ("out", "out_scale")))
def quantize_mxfp4(
    x: Tensor,
    scale_rounding: str = "floor",
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    backend: Backend = None,
) -> tuple[Tensor, Tensor]:
    """Quantise floats to MXFP4, so that ``x`` is about ``codes * scale``.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32, of any strides; K is a multiple of 32.
        scale_rounding: ``"floor"``, the specification's scale, which may saturate the largest element of a group; or
            ``"up"``, the smallest power of two that saturates none.
        out: destination of the codes, uint8 ``[..., K / 2]``.
        out_scale: destination of the scales, float8_e8m0fnu ``[..., K / 32]``.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        Codes, uint8 ``[..., K / 2]``, the first of two in the low four bits; scales, float8_e8m0fnu ``[..., K / 32]``,
        row by row, not swizzled. Zeros, denormals, infinity and NaN have defined results (see `kernelhub.ops.quant`).

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        OCP Microscaling Formats (MX) Specification 1.0, section 6.3; for ``"up"`` Mishra et al. 2025.

    Example:
        >>> import torch, kernelhub
        >>> codes, scale = kernelhub.quantize_mxfp4(torch.randn(4, 64))
        >>> codes.shape, scale.shape
        (torch.Size([4, 32]), torch.Size([4, 2]))
    """
    if _quantize_mxfp4.again is not None:
        again: tuple[Tensor, Tensor] | None = _quantize_mxfp4.again(x, scale_rounding, out, out_scale, backend)
        if again is not None:
            return again
    return _quantized(_quantize_mxfp4, x, scale_rounding, out, out_scale, backend)


@publish(_dequantize_mxfp4, prepares(_dequantize_mxfp4, DequantizeMxPlan), traced=Traced(dequantized_fp4))
def dequantize_mxfp4(
    x: Tensor,
    scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Turn MXFP4 codes and their scales back into floats.

    Args:
        x: codes, uint8 or float4_e2m1fn_x2 ``[..., K / 2]``, the first of two in the low four bits.
        scale: float8_e8m0fnu ``[..., K / 32]``, or its bytes; row by row, not swizzled.
        out_dtype: bfloat16, float16 or float32.
        out: destination ``[..., K]``.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        ``code * scale`` ``[..., K]``, rounded to float32, then to `out_dtype`.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        OCP Microscaling Formats (MX) Specification 1.0; the experts of gpt-oss.

    Example:
        >>> import torch, kernelhub
        >>> x = torch.tensor([[0.5, -6.0, 3.0, 0.0] * 8])
        >>> kernelhub.dequantize_mxfp4(*kernelhub.quantize_mxfp4(x)).float().equal(x)
        True
    """
    if _dequantize_mxfp4.again is not None:
        again: Tensor | None = _dequantize_mxfp4.again(x, scale, out_dtype, out, backend)
        if again is not None:
            return again
    return _dequantized(_dequantize_mxfp4, x, scale, out_dtype, out, backend)


@publish(_quantize_mxfp8, prepares(_quantize_mxfp8, QuantizeMxPlan), traced=Traced(_memory_fp8, ("out", "out_scale")))
def quantize_mxfp8(
    x: Tensor,
    scale_rounding: str = "floor",
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    backend: Backend = None,
) -> tuple[Tensor, Tensor]:
    """Quantise floats to MXFP8, so that ``x`` is about ``codes * scale``.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32, of any strides; the last group may be shorter than 32.
        scale_rounding: ``"floor"``, the specification's scale, which may saturate the largest element of a group; or
            ``"up"``, the smallest power of two that saturates none.
        out: destination of the codes, float8_e4m3fn ``[..., K]``.
        out_scale: destination of the scales, float8_e8m0fnu ``[..., ceil(K / 32)]``.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        Codes, float8_e4m3fn ``[..., K]``; scales, float8_e8m0fnu ``[..., ceil(K / 32)]``, row
        by row, not swizzled. Zeros, denormals, infinity and NaN have defined results (see `kernelhub.ops.quant`).

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        OCP Microscaling Formats (MX) Specification 1.0, section 6.3; for ``"up"`` Mishra et al. 2025.

    Example:
        >>> import torch, kernelhub
        >>> codes, scale = kernelhub.quantize_mxfp8(torch.randn(4, 64))
        >>> codes.shape, scale.shape
        (torch.Size([4, 64]), torch.Size([4, 2]))
    """
    if _quantize_mxfp8.again is not None:
        again: tuple[Tensor, Tensor] | None = _quantize_mxfp8.again(x, scale_rounding, out, out_scale, backend)
        if again is not None:
            return again
    return _quantized(_quantize_mxfp8, x, scale_rounding, out, out_scale, backend)


@publish(_dequantize_mxfp8, prepares(_dequantize_mxfp8, DequantizeMxPlan), traced=Traced(dequantized))
def dequantize_mxfp8(
    x: Tensor,
    scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Turn MXFP8 codes and their scales back into floats.

    Args:
        x: codes, float8_e4m3fn ``[..., K]``.
        scale: float8_e8m0fnu ``[..., ceil(K / 32)]``, or its bytes; row by row, not swizzled.
        out_dtype: bfloat16, float16 or float32.
        out: destination ``[..., K]``.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        ``code * scale`` ``[..., K]``, rounded to float32, then to `out_dtype`.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        OCP Microscaling Formats (MX) Specification 1.0.

    Example:
        >>> import torch, kernelhub
        >>> x = torch.tensor([[0.5, -6.0, 3.0, 0.0] * 8])
        >>> kernelhub.dequantize_mxfp8(*kernelhub.quantize_mxfp8(x)).float().equal(x)
        True
    """
    if _dequantize_mxfp8.again is not None:
        again: Tensor | None = _dequantize_mxfp8.again(x, scale, out_dtype, out, backend)
        if again is not None:
            return again
    return _dequantized(_dequantize_mxfp8, x, scale, out_dtype, out, backend)
