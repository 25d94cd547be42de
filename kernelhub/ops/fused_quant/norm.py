"""`rms_norm_quant`: RMSNorm, after an addition to the residual, with or without quantisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.forms import python_value
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.ops.arguments import alike, dense, dtype_name, refuse, usable
from kernelhub.ops.call_plan import CallPlan, Fixed, prepares
from kernelhub.ops.formats import E8M0
from kernelhub.ops.fused_quant.adapter import NormAdapter
from kernelhub.ops.fused_quant.formats import Results, check_format, format_of, fresh
from kernelhub.ops.fused_quant.problem import NONE, RMS_NORM_QUANT, NormProblem
from kernelhub.ops.fused_quant.reference import rms_norm_quant_reference
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.operands import (
    check_flag,
    check_loose,
    check_number,
    check_operand,
    check_own_memory,
    transformed,
)
from kernelhub.ops.operators import Traced
from kernelhub.ops.quant.arguments import FLOAT_DTYPES, any_rows, as_rows, check_like, check_tensor, shape_of
from kernelhub.probes.device import facts_of

NAME = "rms_norm_quant"
Run = Callable[..., Any]
_NAMES = ("x", "weight", "residual", "scale", "global_scale")


def problem_of(key: Any, device: int) -> NormProblem:
    """The problem that a key means; the key is built in `rms_norm_quant`."""
    dtype, weight_dtype, width, format, scale_dtype, ue8m0, column, residual, unit_offset = key
    return NormProblem(
        facts_of(device),
        dtype_name(dtype),
        width,
        format,
        dtype_name(scale_dtype),
        ue8m0,
        column,
        dtype_name(weight_dtype),
        residual,
        unit_offset,
    )


def check_operands(x: Any, weight: Any, eps: Any, residual: Any, unit_offset: Any) -> None:
    """What the contract says of the operands."""
    check_tensor(NAME, "x", x, FLOAT_DTYPES, None)
    if x.ndim < 1 or x.shape[-1] == 0:
        refuse(NAME, "x", f"has shape {list(x.shape)}", "give [..., K] with at least one column")
    check_tensor(NAME, "weight", weight, tuple(dict.fromkeys((x.dtype, torch.float32))), x)
    if tuple(weight.shape) != (x.shape[-1],):
        refuse(
            NAME, "weight", f"has shape {list(weight.shape)}", f"give [{x.shape[-1]}], a factor for each column of x"
        )
    if residual is not None:
        check_operand(NAME, "residual", residual)
        if residual.dtype is not x.dtype:
            refuse(NAME, "residual", f"has dtype {dtype_name(residual.dtype)}", f"give {dtype_name(x.dtype)} as x has")
        check_like(NAME, "residual", residual, x.shape, (x.dtype,), x)
    check_number(NAME, "eps", eps, "give a float of 0 or more", _fits)
    check_flag(NAME, "unit_offset", unit_offset)


def _fits(eps: float) -> bool:
    return math.isfinite(eps) and eps >= 0


def bind(
    adapter: Any, problem: NormProblem, device: int, tick: Callable[[], int], elsewhere: Callable[[int], Run]
) -> Run:
    """The function that a call runs: the checks, the memory of the results, the launch."""
    launch, results = adapter.launch, Results(NAME, problem, device)
    dtype, weight_dtype = getattr(torch, problem.dtype), getattr(torch, problem.weight_dtype)
    width, has_residual = problem.width, problem.residual
    scale_dtype, column = getattr(torch, problem.scale_dtype), "column" if problem.column else "row"
    form = None if problem.format == NONE else problem.format
    calls, repeats = KnownCalls(adapter.launch), is_repeated(adapter)
    recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds

    def known(
        x: Tensor, shape: tuple[int, ...], weight: Tensor, eps: Any, residual: Tensor | None, scale: Any, whole: Any
    ) -> bool:
        """Nothing that a check would refuse."""
        if not usable(x, dtype, device) or not shape or shape[-1] != width:
            return False
        if not alike(weight, (width,), weight_dtype, device) or type(eps) is not float or not _fits(eps):
            return False
        if has_residual:
            if residual is None or not alike(residual, shape, dtype, device):
                return False
        elif residual is not None:
            return False
        return results.known(scale, whole)

    def run(
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None,
        scale: Tensor | None,
        global_scale: Tensor | None,
        out: Tensor | None,
        out_scale: Tensor | None,
        out_residual: Tensor | None,
    ) -> Any:
        if x.get_device() != device:
            there = elsewhere(x.get_device())
            return there(x, weight, eps, residual, scale, global_scale, out, out_scale, out_residual)
        shape, read = shape_of(NAME, x), (x, weight, residual, scale, global_scale)
        key, state = (shape, eps), 0
        if type(eps) is float and key in calls and dense(x, dtype, device):
            whole, made = results.completed(x, shape, out, out_scale)
            total = x.new_empty(*shape) if out_residual is None and has_residual else out_residual
            state = recognise(key, (*read, whole, made, total))
            if state == 2:
                tick()
                return results.returned(whole, made, scale, total)
        if not state:
            if transformed() or not known(x, shape, weight, eps, residual, scale, global_scale):
                check_operands(x, weight, eps, residual, problem.unit_offset)
                check_format(NAME, x, shape[-1], form, scale, global_scale, problem.ue8m0, scale_dtype, column)
                check_form(x, weight, residual)
                eps = python_value(eps)
            else:
                check_loose(NAME, _NAMES, read)
                if width == 1:  # one element is contiguous whatever it is a view of
                    for name, operand in zip(_NAMES[:3], read[:3], strict=True):
                        if operand is not None and operand.is_neg():
                            check_operand(NAME, name, operand)
            whole, made = results.made(x, shape, out, out_scale, _NAMES, read)
            total = None if out_residual is None else _residual_destination(out_residual, read, (whole, made))
            if total is None and has_residual:
                total = x.new_empty(*shape)
            calls.learn(key, (*read, whole, made, total), 3)
        if x.numel():
            launched = (
                any_rows(x, False),
                weight,
                float(eps),
                None if residual is None else any_rows(residual, False),
                results.given(scale, global_scale),
                *results.rows(whole, made),
                None if total is None else as_rows(NAME, "out_residual", total, False),
            )
            tick()
            try:
                launch(*launched)
            except Exception as error:
                failed(launch, error)
                raise
            if state and repeats:
                calls.attach(key, (*read, whole, made, total), adapter.repeated, *launched)
        return results.returned(whole, made, scale, total)

    def check_form(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
        """The call is what the kernel was made for: a plan may be run with another than it was prepared for."""
        got = (x.dtype, weight.dtype, x.shape[-1], residual is not None)
        if got != (dtype, weight_dtype, width, has_residual):
            wanted = f"{problem.dtype} rows of {width} with a weight in {problem.weight_dtype}"
            wanted += f" and {'a' if has_residual else 'no'} residual"
            said = f"is of a call of {dtype_name(x.dtype)} rows of {x.shape[-1]}, weight in {dtype_name(weight.dtype)}"
            refuse(NAME, "x", f"{said}, {'a' if residual is not None else 'no'} residual", f"the plan is for {wanted}")

    return run


def _residual_destination(
    given: Tensor, read: tuple[Tensor | None, ...], written: tuple[Tensor | None, Tensor | None]
) -> Tensor:
    """The destination of the sum, which may be x or the residual itself. `read` is by `_NAMES`."""
    x, _, residual, *_ = read
    assert x is not None
    if residual is None:
        refuse(NAME, "out_residual", "is given without residual", "give the residual that is added to x")
    check_like(NAME, "out_residual", given, x.shape, (x.dtype,), x)
    others = [None if _is_the_same(given, operand) else operand for operand in (x, residual)]
    names = [*_NAMES, "out", "out_scale"]
    check_own_memory(NAME, "out_residual", given, names, [others[0], read[1], others[1], *read[3:], *written])
    return given


def _check_destinations(
    problem: NormProblem, read: tuple[Any, ...], out: Tensor | None, out_scale: Tensor | None, total: Tensor | None
) -> None:
    """Refuse what a call refuses about its destinations. `read` is by `_NAMES`."""
    x = read[0]
    Results(NAME, problem, x.get_device()).check(tuple(x.shape), out, out_scale, _NAMES, read)
    if total is not None:
        _residual_destination(total, read, (out, out_scale))


def _is_the_same(given: Tensor, operand: Tensor | None) -> bool:
    return operand is not None and given.data_ptr() == operand.data_ptr() and given.stride() == operand.stride()


_op: Op[NormProblem] = Op(
    Contract.of(
        RMS_NORM_QUANT,
        problem_of=problem_of,
        adapter=NormAdapter,
        bind=bind,
        reference=rms_norm_quant_reference,
        example="kernelhub.ops.fused_quant.inputs:norm_inputs",
    )
)
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class NormPlan(CallPlan):
    """A kernel selected for rows like these.

    ``run(x, weight, eps=1e-6, residual=None, scale=None, global_scale=None, out=None, out_scale=None,
    out_residual=None)`` is a whole call.
    """

    __slots__ = ()
    call = "x, weight, eps, residual, scale, global_scale, out, out_scale, out_residual"
    fixed: ClassVar[Fixed] = {
        "format": lambda problem: None if problem.format == NONE else problem.format,
        "ue8m0": attrgetter("ue8m0"),
        "scale_dtype": lambda problem: getattr(torch, problem.scale_dtype),
        "scale_layout": lambda problem: "column" if problem.column else "row",
        "unit_offset": attrgetter("unit_offset"),
    }


def _memory(
    x: Tensor,
    format: str | None,
    scale: Tensor | None,
    scale_dtype: torch.dtype,
    scale_layout: str,
    residual: Tensor | None,
    **others: Any,
) -> dict[str, Tensor]:
    made = fresh(x, x.shape, format or NONE, scale_dtype, scale_layout == "column")
    return made | ({} if residual is None else {"out_residual": x.new_empty(x.shape)})


@publish(
    _op,
    prepares(_op, NormPlan),
    traced=Traced(
        _memory,
        ("out", "out_scale", "out_residual"),
        {"out_scale": "format", "out_residual": "residual"},
        given_back={"out_scale": "scale"},
        in_place=("x", "residual"),
    ),
)
def rms_norm_quant(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    format: str | None = None,
    scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    ue8m0: bool = False,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: str = "row",
    unit_offset: bool = False,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_residual: Tensor | None = None,
    backend: Backend = None,
) -> Any:
    """Normalise rows by their root mean square, after adding them to a residual, and quantise the result.

    ``y = t / sqrt(mean(t^2) + eps) * weight`` with ``t = x + residual``, rounded to x's dtype. The rest is float32.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32, of any strides.
        weight: ``[K]`` in x's dtype or float32.
        eps: added to the mean of the squares.
        residual: ``[..., K]`` in x's dtype, added to x.
        format: form of the result: None, y in x's dtype; ``"fp8_tensor"``, ``"fp8_token"`` or ``"fp8_group"`` (of
            128 elements), float8_e4m3fn; ``"mxfp8"``, float8_e4m3fn in groups of 32; ``"nvfp4"``, uint8 of two codes,
            in groups of 16.
        scale: for ``"fp8_tensor"`` the static scale, float32 of one element.
        global_scale: for ``"nvfp4"`` the static global scale, float32 of one element.
        ue8m0: round the scales of ``"fp8_token"`` and ``"fp8_group"`` up to powers of two.
        scale_dtype: of those scales: float32, or float8_e8m0fnu, which represents powers of two only.
        scale_layout: of those scales: ``"row"``, or ``"column"`` as of `quantize_fp8`.
        unit_offset: the factor is ``1 + weight``, as in Gemma.
        out: destination of the result.
        out_scale: destination of the scales.
        out_residual: destination of t; x and `residual` themselves are allowed.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        The result; if it is quantised also its scales: ``[..., 1]``, ``[..., ceil(K / 128)]`` or float8_e8m0fnu
        ``[..., ceil(K / 32)]``, float8_e4m3fn ``[..., K / 16]``, or for ``"fp8_tensor"`` the given one; with
        `residual` also t. `fp8_gemm` and `fp4_gemm` take codes and scales as they are.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        Zhang and Sennrich 2019; vLLM's ``rms_norm_dynamic_per_token_quant``, ``rms_norm_per_block_quant``.

    Example:
        >>> import torch, kernelhub
        >>> x, residual, weight = torch.randn(4, 512), torch.randn(4, 512), torch.ones(512)
        >>> codes, scale, residual = kernelhub.rms_norm_quant(x, weight, residual=residual, format="fp8_group")
        >>> codes.dtype, scale.shape, residual.shape
        (torch.float8_e4m3fn, torch.Size([4, 4]), torch.Size([4, 512]))
    """
    if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, DryRun):
        return _op.traced(**locals())
    if _op.again is not None:
        again: Any | None = _op.again(
            x,
            weight,
            eps,
            residual,
            format,
            scale,
            global_scale,
            ue8m0,
            scale_dtype,
            scale_layout,
            unit_offset,
            out,
            out_scale,
            out_residual,
            backend,
        )
        if again is not None:
            return again
    try:
        if type(ue8m0) is not bool:
            ue8m0 = check_flag(NAME, "ue8m0", ue8m0)
        if type(unit_offset) is not bool:
            unit_offset = check_flag(NAME, "unit_offset", unit_offset)
        if scale_layout not in ("row", "column"):
            raise ValueError(scale_layout)
        key = (
            x.dtype,
            weight.dtype,
            x.shape[-1],
            NONE if format is None else format,
            scale_dtype,
            ue8m0 or scale_dtype is E8M0,
            scale_layout == "column",
            residual is not None,
            unit_offset,
        )
        hash(key)
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        _check(x, weight, eps, residual, format, scale, global_scale, ue8m0, scale_dtype, scale_layout, unit_offset)
        raise
    run = _op.table.get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None:
        _check(x, weight, eps, residual, format, scale, global_scale, ue8m0, scale_dtype, scale_layout, unit_offset)
        if isinstance(backend, DryRun):
            read = (x, weight, residual, scale, global_scale)
            _check_destinations(problem_of(key, x.get_device()), read, out, out_scale, out_residual)
        run = _op.decide(key, x.get_device(), backend)
    return run(x, weight, eps, residual, scale, global_scale, out, out_scale, out_residual)


def _check(
    x: Any,
    weight: Any,
    eps: Any,
    residual: Any,
    format: Any,
    scale: Any,
    global_scale: Any,
    ue8m0: Any,
    scale_dtype: Any,
    scale_layout: Any,
    unit_offset: Any,
) -> None:
    """Everything that the contract says of a call but its destinations."""
    format_of(NAME, format)
    check_operands(x, weight, eps, residual, unit_offset)
    check_format(NAME, x, x.shape[-1], format, scale, global_scale, ue8m0, scale_dtype, scale_layout)
