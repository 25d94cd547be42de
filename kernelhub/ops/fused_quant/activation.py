"""`silu_and_mul_quant`: SiLU of the gate times up, with or without quantisation."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.ops.arguments import dense, dtype_name, refuse, usable
from kernelhub.ops.call_plan import CallPlan, Fixed, prepares
from kernelhub.ops.formats import E8M0
from kernelhub.ops.fused_quant.adapter import ActivationAdapter
from kernelhub.ops.fused_quant.formats import Results, check_format, format_of, fresh
from kernelhub.ops.fused_quant.problem import NONE, SILU_AND_MUL_QUANT, ActivationProblem
from kernelhub.ops.fused_quant.reference import silu_and_mul_quant_reference
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.operands import check_flag, check_loose, transformed
from kernelhub.ops.operators import Traced
from kernelhub.ops.quant.arguments import FLOAT_DTYPES, any_rows, check_tensor, shape_of
from kernelhub.probes.device import facts_of

NAME = "silu_and_mul_quant"
Run = Callable[..., Any]
_NAMES = ("x", "scale", "global_scale")


def problem_of(key: Any, device: int) -> ActivationProblem:
    """The problem that a key means; the key is built in `silu_and_mul_quant`."""
    dtype, width, format, scale_dtype, ue8m0, column = key
    return ActivationProblem(
        facts_of(device), dtype_name(dtype), width // 2, format, dtype_name(scale_dtype), ue8m0, column
    )


def check_x(x: Any) -> None:
    """What the contract says of the operand."""
    check_tensor(NAME, "x", x, FLOAT_DTYPES, None)
    if x.ndim < 1 or x.shape[-1] == 0 or x.shape[-1] % 2:
        refuse(NAME, "x", f"has shape {list(x.shape)}", "give [..., 2 K]: the gate, followed by up")


def bind(
    adapter: Any, problem: ActivationProblem, device: int, tick: Callable[[], int], elsewhere: Callable[[int], Run]
) -> Run:
    """The function that a call runs: the checks, the memory of the results, the launch."""
    launch, results = adapter.launch, Results(NAME, problem, device)
    dtype, width = getattr(torch, problem.dtype), problem.width
    scale_dtype, column = getattr(torch, problem.scale_dtype), "column" if problem.column else "row"
    form = None if problem.format == NONE else problem.format
    calls, repeats = KnownCalls(adapter.launch), is_repeated(adapter)
    recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds

    def run(
        x: Tensor, scale: Tensor | None, global_scale: Tensor | None, out: Tensor | None, out_scale: Tensor | None
    ) -> Any:
        if x.get_device() != device:
            return elsewhere(x.get_device())(x, scale, global_scale, out, out_scale)
        shape, read = shape_of(NAME, x), (x, scale, global_scale)
        state = 0
        if shape in calls and dense(x, dtype, device):
            whole, made = results.completed(x, (*shape[:-1], width), out, out_scale)
            state = recognise(shape, (*read, whole, made))
            if state == 2:
                tick()
                return results.returned(whole, made, scale)
        if not state:
            right = usable(x, dtype, device) and len(shape) > 0 and shape[-1] == 2 * width
            if transformed() or not right or not results.known(scale, global_scale):
                check_x(x)
                check_format(NAME, x, shape[-1] // 2, form, scale, global_scale, problem.ue8m0, scale_dtype, column)
                if x.dtype is not dtype or shape[-1] != 2 * width:
                    wanted = f"the plan is for {problem.dtype} rows of {2 * width}"
                    refuse(NAME, "x", f"has {dtype_name(x.dtype)} rows of {shape[-1]}", wanted)
            else:
                check_loose(NAME, _NAMES, read)
            whole, made = results.made(x, (*shape[:-1], width), out, out_scale, _NAMES, read)
            calls.learn(shape, (*read, whole, made), 2)
        if x.numel():
            launched = any_rows(x, False), results.given(scale, global_scale), *results.rows(whole, made)
            tick()
            try:
                launch(*launched)
            except Exception as error:
                failed(launch, error)
                raise
            if state and repeats:
                calls.attach(shape, (*read, whole, made), adapter.repeated, *launched)
        return results.returned(whole, made, scale)

    return run


_op: Op[ActivationProblem] = Op(
    Contract.of(
        SILU_AND_MUL_QUANT,
        problem_of=problem_of,
        adapter=ActivationAdapter,
        bind=bind,
        reference=silu_and_mul_quant_reference,
        example="kernelhub.ops.fused_quant.inputs:activation_inputs",
    )
)
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class ActivationPlan(CallPlan):
    """A kernel selected for rows like these.

    ``run(x, scale=None, global_scale=None, out=None, out_scale=None)`` is a whole call.
    """

    __slots__ = ()
    call = "x, scale, global_scale, out, out_scale"
    fixed: ClassVar[Fixed] = {
        "format": lambda problem: None if problem.format == NONE else problem.format,
        "ue8m0": attrgetter("ue8m0"),
        "scale_dtype": lambda problem: getattr(torch, problem.scale_dtype),
        "scale_layout": lambda problem: "column" if problem.column else "row",
    }


def _memory(
    x: Tensor, format: str | None, scale_dtype: torch.dtype, scale_layout: str, **others: Any
) -> dict[str, Tensor]:
    return fresh(x, (*x.shape[:-1], x.shape[-1] // 2), format or NONE, scale_dtype, scale_layout == "column")


@publish(
    _op,
    prepares(_op, ActivationPlan),
    traced=Traced(_memory, ("out", "out_scale"), {"out_scale": "format"}, given_back={"out_scale": "scale"}),
)
def silu_and_mul_quant(
    x: Tensor,
    format: str | None = None,
    scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    ue8m0: bool = False,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: str = "row",
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    backend: Backend = None,
) -> Any:
    """Multiply SiLU of the gate with up, and quantise the result.

    ``y = gate / (1 + exp(-gate)) * up``, in float32.

    Args:
        x: ``[..., 2 K]``, bfloat16, float16 or float32, of any strides: the gate, followed by up.
        format: form of the result: None, y in x's dtype; ``"fp8_tensor"``, ``"fp8_token"`` or ``"fp8_group"`` (of
            128 elements), float8_e4m3fn; ``"mxfp8"``, float8_e4m3fn in groups of 32; ``"nvfp4"``, uint8 of two codes,
            in groups of 16.
        scale: for ``"fp8_tensor"`` the static scale, float32 of one element.
        global_scale: for ``"nvfp4"`` the static global scale, float32 of one element.
        ue8m0: round the scales of ``"fp8_token"`` and ``"fp8_group"`` up to powers of two.
        scale_dtype: of those scales: float32, or float8_e8m0fnu, which represents powers of two only.
        scale_layout: of those scales: ``"row"``, or ``"column"`` as of `quantize_fp8`.
        out: destination of the result.
        out_scale: destination of the scales.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        The result ``[..., K]``; if it is quantised also its scales, as of `rms_norm_quant`.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        Shazeer 2020, "GLU Variants Improve Transformer"; vLLM's ``silu_and_mul_quant``, ``silu_and_mul_nvfp4_quant``.

    Example:
        >>> import torch, kernelhub
        >>> codes, scale = kernelhub.silu_and_mul_quant(torch.randn(4, 1024), "fp8_token")
        >>> codes.shape, scale.shape
        (torch.Size([4, 512]), torch.Size([4, 1]))
    """
    if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, DryRun):
        return _op.traced(**locals())
    if _op.again is not None:
        again: Any | None = _op.again(
            x, format, scale, global_scale, ue8m0, scale_dtype, scale_layout, out, out_scale, backend
        )
        if again is not None:
            return again
    try:
        if type(ue8m0) is not bool:
            ue8m0 = check_flag(NAME, "ue8m0", ue8m0)
        if scale_layout not in ("row", "column"):
            raise ValueError(scale_layout)
        width = x.shape[-1]
        if width < 2 or width % 2:
            raise ValueError(width)
        key = (
            x.dtype,
            width,
            NONE if format is None else format,
            scale_dtype,
            ue8m0 or scale_dtype is E8M0,
            scale_layout == "column",
        )
        hash(key)
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        _check(x, format, scale, global_scale, ue8m0, scale_dtype, scale_layout)
        raise
    run = _op.table.get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None:
        _check(x, format, scale, global_scale, ue8m0, scale_dtype, scale_layout)
        if isinstance(backend, DryRun):
            results = Results(NAME, problem_of(key, x.get_device()), x.get_device())
            results.check((*x.shape[:-1], width // 2), out, out_scale, _NAMES, (x, scale, global_scale))
        run = _op.decide(key, x.get_device(), backend)
    return run(x, scale, global_scale, out, out_scale)


def _check(x: Any, format: Any, scale: Any, global_scale: Any, ue8m0: Any, scale_dtype: Any, scale_layout: Any) -> None:
    """Everything that the contract says of a call but its destinations."""
    format_of(NAME, format)
    check_x(x)
    check_format(NAME, x, x.shape[-1] // 2, format, scale, global_scale, ue8m0, scale_dtype, scale_layout)
