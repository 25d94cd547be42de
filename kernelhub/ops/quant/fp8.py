"""`quantize_fp8` and `dequantize_fp8`: float8_e4m3fn with scales per tensor, token, group or block."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.forms import python_value
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.ops.arguments import dense, dtype_name, refuse, usable
from kernelhub.ops.call_plan import CallPlan, Fixed, prepares
from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.operands import check_count, check_flag, check_loose, check_operand, transformed
from kernelhub.ops.operators import Traced
from kernelhub.ops.quant.adapter import DequantizeAdapter, QuantizeAdapter
from kernelhub.ops.quant.arguments import (
    FP8_SCALE_DTYPES,
    any_rows,
    as_rows,
    check_like,
    check_one,
    check_tensor,
    check_x,
    dequantized,
    destination,
    fp8_scale_shape,
    new_scale,
    scale_shape_of_call,
    shape_of,
)
from kernelhub.ops.quant.dequantize_call import (
    bind_dequantize,
    check_dequantize_fp8,
    dequantize_fp8_problem,
    granularity_of,
)
from kernelhub.ops.quant.problem import (
    BLOCK,
    DEQUANTIZE_FP8,
    GRANULARITIES,
    GROUP,
    QUANTIZE_FP8,
    TENSOR,
    TOKEN,
    DequantizeFp8Problem,
    QuantizeFp8Problem,
)
from kernelhub.ops.quant.reference import LEAST_SCALE, dequantize_fp8_reference, quantize_fp8_reference
from kernelhub.probes.device import facts_of

Run = Callable[..., Any]
LAYOUTS = ("row", "column")
_READ, _WRITTEN = ("x", "scale"), ("x", "out_scale")


def fp8_problem(key: Any, device: int) -> QuantizeFp8Problem:
    """The problem that a key means; the key is built in `quantize_fp8`."""
    dtype, granularity, group_size, scale_dtype, ue8m0, static, column = key
    return QuantizeFp8Problem(
        facts_of(device),
        dtype_name(dtype),
        granularity,
        group_size,
        dtype_name(scale_dtype),
        ue8m0,
        static,
        column,
    )


def check_fp8(x: Any, granularity: Any, group_size: Any, scale: Any, ue8m0: Any, scale_dtype: Any, layout: Any) -> None:
    """Everything that the contract says of a call but its destinations."""
    op = "quantize_fp8"
    if granularity not in GRANULARITIES:
        refuse(op, "granularity", f"is {granularity!r}", f"give one of {', '.join(GRANULARITIES)}")
    check_count(op, "group_size", group_size, 1, fix="give a positive int")
    check_flag(op, "ue8m0", ue8m0)
    if scale_dtype not in FP8_SCALE_DTYPES:
        refuse(op, "scale_dtype", f"is {scale_dtype}", "give torch.float32 or torch.float8_e8m0fnu")
    if layout not in LAYOUTS:
        refuse(op, "scale_layout", f"is {layout!r}", "give 'row' or 'column'")
    check_x(op, x, dims=2 if granularity == BLOCK else 1)
    if scale is None:
        return
    if granularity not in (TENSOR, TOKEN):
        refuse(op, "scale", f"is given for granularity {granularity!r}", "only tensor and token scales can be given")
    if ue8m0 or scale_dtype != torch.float32:
        refuse(op, "scale", "is given with scales to be rounded", "leave ue8m0 and scale_dtype alone")
    check_tensor(op, "scale", scale, (torch.float32,), x)
    if granularity == TENSOR:
        check_one(op, "scale", scale, x)
    elif tuple(scale.shape) not in (tuple(x.shape[:-1]), (*x.shape[:-1], 1)):
        check_like(op, "scale", scale, (*x.shape[:-1], 1), (torch.float32,), x)


def check_fp8_destinations(
    x: Tensor, granularity: str, group_size: int, scale: Tensor | None, scale_dtype: torch.dtype, out: Any, given: Any
) -> None:
    """The destinations of the codes and of the scales, `given`, that a plan is prepared with."""
    op, device, names = "quantize_fp8", x.get_device(), _READ
    if given is not None:
        if scale is not None:
            refuse_second_scale()
        scales = scale_shape_of_call(x.shape, granularity, group_size)
        scale, names = destination(op, "out_scale", given, scales, scale_dtype, device, _READ[:1], (x,)), _WRITTEN
    if out is not None:
        destination(op, "out", out, x.shape, E4M3, device, names, (x, scale))


def refuse_second_scale() -> NoReturn:
    """Raise the error for a call with a scale and a destination of scales."""
    refuse("quantize_fp8", "out_scale", "is given beside a scale", "the scale that is given is the result")


def bind_fp8(
    adapter: Any, problem: QuantizeFp8Problem, device: int, tick: Callable[[], int], elsewhere: Callable[[int], Run]
) -> Run:
    """The function that a call of `quantize_fp8` runs."""
    launch, op = adapter.launch, "quantize_fp8"
    dtype, scale_dtype = getattr(torch, problem.dtype), getattr(torch, problem.scale_dtype)
    granularity, group_size, block = problem.granularity, problem.group_size, problem.granularity == BLOCK
    static, per_tensor, dims = problem.static, granularity == TENSOR, 2 if block else 1
    calls, repeats = KnownCalls(adapter.launch), is_repeated(adapter)
    recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds

    def known(x: Tensor, shape: tuple[int, ...], scale: Tensor | None) -> bool:
        """Nothing that `check_fp8` would refuse."""
        if not usable(x, dtype, device) or len(shape) < dims or not shape[-1]:
            return False
        if scale is None or not static:
            return scale is None and not static
        if not usable(scale, torch.float32, device):
            return False
        return scale.numel() == 1 if per_tensor else scale.shape == (*shape[:-1], 1)

    def checked(
        x: Tensor, shape: tuple[int, ...], scale: Tensor | None, out: Tensor | None, out_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The scales and the codes of a call that is not known, after all checks."""
        if transformed() or not known(x, shape, scale):
            check_fp8(x, granularity, group_size, scale, problem.ue8m0, scale_dtype, "row")
            if x.dtype is not dtype:
                refuse(op, "x", f"has dtype {dtype_name(x.dtype)}", f"the plan is for {problem.dtype}")
            if (scale is not None) != static:
                wanted = "a scale" if static else "no scale"
                refuse(op, "scale", f"is {'missing' if scale is None else 'given'}", f"the plan is for {wanted}")
        else:
            check_loose(op, _READ[:1], (x,))
            if shape[-1] == 1 and x.is_neg():  # one element is contiguous whatever it is a view of
                check_operand(op, "x", x)
            if scale is not None and scale.is_neg():
                check_operand(op, "scale", scale)
        if out_scale is not None:
            if scale is not None:
                refuse_second_scale()
            scales = scale_shape_of_call(shape, granularity, group_size)
            scale = destination(op, "out_scale", out_scale, scales, scale_dtype, device, _READ[:1], (x,))
        elif scale is None:
            scale = new_scale(
                x, scale_shape_of_call(shape, granularity, group_size), scale_dtype, problem.column, block
            )
        out = destination(op, "out", out, shape, E4M3, device, _WRITTEN if out_scale is not None else _READ, (x, scale))
        return scale, out

    def run(x: Tensor, scale: Tensor | None, out: Tensor | None, out_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        if x.get_device() != device:
            result: tuple[Tensor, Tensor] = elsewhere(x.get_device())(x, scale, out, out_scale)
            return result
        shape = shape_of(op, x)
        state, read = 0, (x, scale)
        if shape in calls and dense(x, dtype, device):
            made = out_scale
            if scale is None and out_scale is None:
                scales = scale_shape_of_call(shape, granularity, group_size)
                made = new_scale(x, scales, scale_dtype, problem.column, block)
            whole = x.new_empty(*shape, dtype=E4M3) if out is None else out
            given = (*read, whole, made)
            state = recognise(shape, given)
            if state:
                out, scale = whole, scale if made is None else made
                assert scale is not None
                if state == 2:
                    tick()
                    return out, scale
        if not state:
            scale, out = checked(x, shape, scale, out, out_scale)
            given = (*read, out, None if read[1] is not None else scale)
            calls.learn(shape, given, 2)
        assert scale is not None
        assert out is not None
        if x.numel():
            if per_tensor:
                areas = scale.view(1, 1)
            elif static:
                areas = any_rows(scale.unsqueeze(-1) if scale.ndim < x.ndim else scale, False)
            else:
                areas = as_rows(op, "out_scale", scale, block)
            launched = any_rows(x, block), as_rows(op, "out", out, block), areas, None
            tick()
            try:
                launch(*launched)
            except Exception as error:
                failed(launch, error)
                raise
            if state and repeats:
                calls.attach(shape, given, adapter.repeated, *launched)
        elif not problem.static:
            scale.fill_(LEAST_SCALE)
        return out, scale

    return run


_quantize: Op[QuantizeFp8Problem] = Op(
    Contract.of(
        QUANTIZE_FP8,
        problem_of=fp8_problem,
        adapter=QuantizeAdapter,
        bind=bind_fp8,
        reference=quantize_fp8_reference,
        example="kernelhub.ops.quant.inputs:quantize_inputs",
    )
)
_dequantize: Op[DequantizeFp8Problem] = Op(
    Contract.of(
        DEQUANTIZE_FP8,
        problem_of=dequantize_fp8_problem,
        adapter=DequantizeAdapter,
        bind=bind_dequantize("dequantize_fp8"),
        reference=dequantize_fp8_reference,
        example="kernelhub.ops.quant.inputs:quantize_inputs",
    )
)
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class QuantizeFp8Plan(CallPlan):
    """A kernel selected for tensors like this: ``run(x, scale=None, out=None, out_scale=None)`` is a whole call."""

    __slots__ = ()
    call = "x, scale, out, out_scale"
    fixed: ClassVar[Fixed] = {
        "granularity": attrgetter("granularity"),
        "group_size": attrgetter("group_size"),
        "ue8m0": attrgetter("ue8m0"),
        "scale_dtype": lambda problem: getattr(torch, problem.scale_dtype),
        "scale_layout": lambda problem: "column" if problem.column else "row",
    }


class DequantizeFp8Plan(CallPlan):
    """A kernel selected for codes like these: ``run(x, scale, out=None)`` is a whole call."""

    __slots__ = ()
    call = "x, scale, None, out"
    fixed: ClassVar[Fixed] = {
        "group_size": attrgetter("group_size"),
        "out_dtype": lambda problem: getattr(torch, problem.out_dtype),
    }


def _memory(
    x: Tensor,
    granularity: str,
    group_size: int,
    scale: Tensor | None,
    scale_dtype: torch.dtype,
    scale_layout: str,
    **others: Any,
) -> dict[str, Tensor]:
    codes = x.new_empty(x.shape, dtype=E4M3)
    if scale is not None:
        return {"out": codes}
    shape = fp8_scale_shape(x.shape, granularity, group_size)
    return {"out": codes, "out_scale": new_scale(x, shape, scale_dtype, scale_layout == "column", granularity == BLOCK)}


@publish(
    _quantize,
    prepares(_quantize, QuantizeFp8Plan),
    traced=Traced(_memory, ("out", "out_scale"), given_back={"out_scale": "scale"}),
)
def quantize_fp8(
    x: Tensor,
    granularity: str = "token",
    group_size: int = 128,
    scale: Tensor | None = None,
    ue8m0: bool = False,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: str = "row",
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    backend: Backend = None,
) -> tuple[Tensor, Tensor]:
    """Quantise floats to float8_e4m3fn, so that ``x`` is about ``codes * scale``.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32, of any strides; ``[..., N, K]`` for blocks.
        granularity: elements that share a scale: ``"tensor"``, all; ``"token"``, a row (also a weight's output
            channel); ``"group"``, `group_size` elements of a row, the last group may be shorter; ``"block"``,
            128 x 128.
        group_size: elements of a group; 128 for DeepSeek's activations.
        scale: a static scale, float32 of one element for ``"tensor"``, ``[...]`` or ``[..., 1]`` for ``"token"``.
        ue8m0: round scales up to powers of two.
        scale_dtype: float32, or float8_e8m0fnu, which represents powers of two only.
        scale_layout: ``"row"``; or ``"column"``, column-major scales whose columns are aligned to 16 bytes, which
            DeepGEMM's and vLLM's kernels read without a copy.
        out: destination of the codes, float8_e4m3fn of x's shape.
        out_scale: destination of the scales.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        The codes in x's shape, and the scales: ``[1]``, ``[..., 1]``, ``[..., ceil(K / group_size)]`` or
        ``[..., ceil(N / 128), ceil(K / 128)]``; a given scale is returned as it is. Codes saturate at 448. Zeros,
        denormals, infinity and NaN have defined results (see `kernelhub.ops.quant`).

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        DeepSeek-V3 (2024), section 3.3; FP8 Formats for Deep Learning (Micikevicius et al. 2022).

    Example:
        >>> import torch, kernelhub
        >>> codes, scale = kernelhub.quantize_fp8(torch.randn(4, 512), "group")
        >>> codes.dtype, scale.shape
        (torch.float8_e4m3fn, torch.Size([4, 4]))
    """
    if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, DryRun):
        traced: tuple[Tensor, Tensor] = _quantize.traced(**locals())
        return traced
    if _quantize.again is not None:
        again: tuple[Tensor, Tensor] | None = _quantize.again(
            x, granularity, group_size, scale, ue8m0, scale_dtype, scale_layout, out, out_scale, backend
        )
        if again is not None:
            return again
    try:
        if type(ue8m0) is not bool:
            ue8m0 = check_flag("quantize_fp8", "ue8m0", ue8m0)
        if type(group_size) is not int:
            group_size = python_value(group_size)
        key = (
            x.dtype,
            granularity,
            group_size if granularity == GROUP else 128,
            scale_dtype,
            ue8m0 or scale_dtype is E8M0,
            scale is not None,
            scale_layout == "column",
        )
        hash(key)
        if scale_layout not in ("row", "column"):
            raise ValueError(scale_layout)
        if type(group_size) is not int or group_size < 1:
            raise ValueError(group_size)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        check_fp8(x, granularity, group_size, scale, ue8m0, scale_dtype, scale_layout)
        raise
    plain = backend is None and not (_contexts_used and _contexts())
    run = _quantize.table.get(key) if plain else _quantize.override(key, backend)
    if run is None:
        check_fp8(x, granularity, group_size, scale, ue8m0, scale_dtype, scale_layout)
        if isinstance(backend, DryRun):
            check_fp8_destinations(x, granularity, group_size, scale, scale_dtype, out, out_scale)
        run = _quantize.decide(key, x.get_device(), backend)
    result: tuple[Tensor, Tensor] = run(x, scale, out, out_scale)
    return result


@publish(_dequantize, prepares(_dequantize, DequantizeFp8Plan), traced=Traced(dequantized))
def dequantize_fp8(
    x: Tensor,
    scale: Tensor,
    group_size: int = 128,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Turn float8_e4m3fn codes and their scales back into floats.

    Args:
        x: codes, float8_e4m3fn ``[..., K]``, of any strides.
        scale: float32 or float8_e8m0fnu. Its shape determines the granularity: one element, ``[...]`` or
            ``[..., 1]``, ``[..., ceil(K / group_size)]``, or ``[..., ceil(N / 128), ceil(K / 128)]`` for blocks.
        group_size: elements of a row that share a scale, for scales per group.
        out_dtype: bfloat16, float16 or float32.
        out: destination of x's shape.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        ``code * scale`` in x's shape, rounded to float32, then to `out_dtype`.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        The checkpoints of DeepSeek-V3, whose ``weight_scale_inv`` is a scale per block.

    Example:
        >>> import torch, kernelhub
        >>> weight = torch.randn(256, 384)
        >>> back = kernelhub.dequantize_fp8(*kernelhub.quantize_fp8(weight, "block"), out_dtype=torch.float32)
        >>> bool((back - weight).abs().max() < weight.abs().max() / 16)
        True
    """
    if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, DryRun):
        traced: Tensor = _dequantize.traced(**locals())
        return traced
    if _dequantize.again is not None:
        again: Tensor | None = _dequantize.again(x, scale, group_size, out_dtype, out, backend)
        if again is not None:
            return again
    try:
        if type(group_size) is not int:
            group_size = python_value(group_size)
        form = granularity_of(x.shape, scale.shape, group_size)
        key = (out_dtype, form, group_size if form == GROUP else 128, scale.dtype)
        hash(key)
        if not form or type(group_size) is not int or group_size < 1:
            raise ValueError(form)
    except (AttributeError, TypeError, ValueError, IndexError, ZeroDivisionError, RuntimeError):
        check_dequantize_fp8(x, scale, group_size, out_dtype)
        raise
    plain = backend is None and not (_contexts_used and _contexts())
    run = _dequantize.table.get(key) if plain else _dequantize.override(key, backend)
    if run is None:
        check_dequantize_fp8(x, scale, group_size, out_dtype)
        run = _dequantize.decide(key, x.get_device(), backend)
    result: Tensor = run(x, scale, None, out)
    return result
