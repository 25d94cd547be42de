"""`quantize_nvfp4` and `dequantize_nvfp4`: float4 with a float8 scale for 16 elements and one for the tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.ops.arguments import alike, dense, describe, dtype_name, refuse, usable
from kernelhub.ops.call_plan import CallPlan, Fixed, prepares
from kernelhub.ops.formats import E4M3
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.operands import check_loose, check_own_memory, transformed
from kernelhub.ops.operators import Traced
from kernelhub.ops.quant.adapter import DequantizeAdapter, QuantizeAdapter
from kernelhub.ops.quant.arguments import any_rows, as_rows, check_one, check_x, dequantized_fp4, destination, shape_of
from kernelhub.ops.quant.dequantize_call import bind_dequantize, check_dequantize, dequantize_problem
from kernelhub.ops.quant.problem import (
    DEQUANTIZE_NVFP4,
    NVFP4_GROUP,
    QUANTIZE_NVFP4,
    DequantizeProblem,
    QuantizeNvfp4Problem,
)
from kernelhub.ops.quant.reference import LEAST_GLOBAL_SCALE, dequantize_nvfp4_reference, quantize_nvfp4_reference
from kernelhub.probes.device import facts_of

Run = Callable[..., Any]


def nvfp4_problem(key: Any, device: int) -> QuantizeNvfp4Problem:
    """The problem that a key means; the key is built in `quantize_nvfp4`."""
    dtype, static = key
    return QuantizeNvfp4Problem(facts_of(device), dtype_name(dtype), static)


def check_nvfp4(x: Any, global_scale: Any) -> None:
    """Everything that the contract says of a call but its destinations."""
    check_x("quantize_nvfp4", x, NVFP4_GROUP)
    if global_scale is not None:
        check_one("quantize_nvfp4", "global_scale", global_scale, x)


def check_out_global_scale(x: Tensor, global_scale: Tensor | None, given: Any) -> None:
    """The destination of the global scale."""
    op = "quantize_nvfp4"
    if global_scale is not None:
        refuse(op, "out_global_scale", "is given beside global_scale", "the one that is given is the result")
    if not alike(given, (1,), torch.float32, x.get_device()):
        check_one(op, "out_global_scale", given, x)
        if given.ndim > 1:
            refuse(op, "out_global_scale", f"is {describe(given)}", "give float32 [1]")
    check_own_memory(op, "out_global_scale", given, ("x",), (x,))


def check_nvfp4_destinations(x: Tensor, global_scale: Tensor | None, out: Any, out_scale: Any, given: Any) -> None:
    """The destinations of the codes, of the scales and of the global scale, `given`, that a plan is prepared with."""
    op, (*lead, width), device = "quantize_nvfp4", x.shape, x.get_device()
    if given is not None:
        check_out_global_scale(x, global_scale, given)
    others = {"x": x, **({"global_scale": global_scale} if given is None else {"out_global_scale": given})}
    if out is not None:
        destination(op, "out", out, (*lead, width // 2), torch.uint8, device, (*others,), (*others.values(),))
    others["out"] = out
    if out_scale is not None:
        scales = (*lead, width // NVFP4_GROUP)
        destination(op, "out_scale", out_scale, scales, E4M3, device, (*others,), (*others.values(),))


def bind_nvfp4(
    adapter: Any, problem: QuantizeNvfp4Problem, device: int, tick: Callable[[], int], elsewhere: Callable[[int], Run]
) -> Run:
    """The function that a call of `quantize_nvfp4` runs."""
    launch, op, dtype = adapter.launch, "quantize_nvfp4", getattr(torch, problem.dtype)
    static, float32 = problem.static, torch.float32
    calls, repeats = KnownCalls(adapter.launch), is_repeated(adapter)
    recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds

    def known(x: Tensor, shape: tuple[int, ...], global_scale: Tensor | None) -> bool:
        """Nothing that `check_nvfp4` would refuse."""
        if not usable(x, dtype, device) or not shape or not shape[-1] or shape[-1] % NVFP4_GROUP:
            return False
        if global_scale is None or not static:
            return global_scale is None and not static
        return usable(global_scale, float32, device) and global_scale.numel() == 1

    def checked(
        x: Tensor,
        shape: tuple[int, ...],
        global_scale: Tensor | None,
        out: Tensor | None,
        out_scale: Tensor | None,
        out_global_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The results of a call that is not known, after all checks."""
        if transformed() or not known(x, shape, global_scale):
            check_nvfp4(x, global_scale)
            if x.dtype is not dtype:
                refuse(op, "x", f"has dtype {dtype_name(x.dtype)}", f"the plan is for {problem.dtype}")
            if (global_scale is not None) != static:
                wanted = "a global scale" if static else "no global scale"
                refuse(op, "global_scale", f"is {'missing' if static else 'given'}", f"the plan is for {wanted}")
        else:
            check_loose(op, ("x", "global_scale"), (x, global_scale))
            if global_scale is not None and (global_scale.is_neg() or global_scale.is_nested):
                check_nvfp4(x, global_scale)
        if global_scale is None:
            if out_global_scale is None:
                global_scale = x.new_empty(1, dtype=float32)
            else:
                global_scale = out_global_scale
                check_out_global_scale(x, None, global_scale)
        elif out_global_scale is not None:
            check_out_global_scale(x, global_scale, out_global_scale)
        *lead, width = shape
        names = ("x", "global_scale" if out_global_scale is None else "out_global_scale", "out")
        out = destination(op, "out", out, (*lead, width // 2), torch.uint8, device, names[:2], (x, global_scale))
        scales, others = (*lead, width // NVFP4_GROUP), (x, global_scale, out)
        out_scale = destination(op, "out_scale", out_scale, scales, E4M3, device, names, others)
        return out, out_scale, global_scale

    def run(
        x: Tensor,
        global_scale: Tensor | None,
        out: Tensor | None,
        out_scale: Tensor | None,
        out_global_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if x.get_device() != device:
            result: tuple[Tensor, Tensor, Tensor] = elsewhere(x.get_device())(
                x, global_scale, out, out_scale, out_global_scale
            )
            return result
        shape = shape_of(op, x)
        state, read = 0, (x, global_scale)
        if shape in calls and dense(x, dtype, device):
            *lead, width = shape
            codes = x.new_empty(*lead, width // 2, dtype=torch.uint8) if out is None else out
            scale = x.new_empty(*lead, width // NVFP4_GROUP, dtype=E4M3) if out_scale is None else out_scale
            whole = out_global_scale
            if global_scale is None and whole is None:
                whole = x.new_empty(1, dtype=float32)
            given = (*read, codes, scale, whole)
            state = recognise(shape, given)
            if state:
                out, out_scale, global_scale = codes, scale, whole if global_scale is None else global_scale
                assert global_scale is not None
                if state == 2:
                    tick()
                    return out, out_scale, global_scale
        if not state:
            out, out_scale, global_scale = checked(x, shape, global_scale, out, out_scale, out_global_scale)
            given = (*read, out, out_scale, global_scale if read[1] is None else out_global_scale)
            calls.learn(shape, given, 3)
        assert out is not None
        assert out_scale is not None
        assert global_scale is not None
        if x.numel():
            rows = as_rows(op, "out", out, False), as_rows(op, "out_scale", out_scale, False)
            launched = any_rows(x, False), *rows, global_scale
            tick()
            try:
                launch(*launched)
            except Exception as error:
                failed(launch, error)
                raise
            if state and repeats:
                calls.attach(shape, given, adapter.repeated, *launched)
        elif not problem.static:
            global_scale.fill_(LEAST_GLOBAL_SCALE)
        return out, out_scale, global_scale

    return run


_quantize: Op[QuantizeNvfp4Problem] = Op(
    Contract.of(
        QUANTIZE_NVFP4,
        problem_of=nvfp4_problem,
        adapter=QuantizeAdapter,
        bind=bind_nvfp4,
        reference=quantize_nvfp4_reference,
        example="kernelhub.ops.quant.inputs:quantize_inputs",
    )
)
_dequantize: Op[DequantizeProblem] = Op(
    Contract.of(
        DEQUANTIZE_NVFP4,
        problem_of=dequantize_problem,
        adapter=DequantizeAdapter,
        bind=bind_dequantize("dequantize_nvfp4"),
        reference=dequantize_nvfp4_reference,
        example="kernelhub.ops.quant.inputs:quantize_inputs",
    )
)
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get
_Three = tuple[Tensor, Tensor, Tensor]


class QuantizeNvfp4Plan(CallPlan):
    """A kernel selected for tensors like this.

    ``run(x, global_scale=None, out=None, out_scale=None, out_global_scale=None)`` is a whole call.
    """

    __slots__ = ()
    call = "x, global_scale, out, out_scale, out_global_scale"


class DequantizeNvfp4Plan(CallPlan):
    """A kernel selected for codes like these: ``run(x, scale, global_scale, out=None)`` is a whole call."""

    __slots__ = ()
    call = "x, scale, global_scale, out"
    fixed: ClassVar[Fixed] = {"out_dtype": lambda problem: getattr(torch, problem.out_dtype)}


def _memory(x: Tensor, **others: Any) -> dict[str, Tensor]:
    *lead, width = x.shape
    return {
        "out": x.new_empty((*lead, width // 2), dtype=torch.uint8),
        "out_scale": x.new_empty((*lead, width // NVFP4_GROUP), dtype=E4M3),
        "out_global_scale": x.new_empty(1, dtype=torch.float32),
    }


@publish(
    _quantize,
    prepares(_quantize, QuantizeNvfp4Plan),
    traced=Traced(_memory, ("out", "out_scale", "out_global_scale"), given_back={"out_global_scale": "global_scale"}),
)
def quantize_nvfp4(
    x: Tensor,
    global_scale: Tensor | None = None,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_global_scale: Tensor | None = None,
    backend: Backend = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise floats to NVFP4, so that ``x`` is about ``codes * scale * global_scale``.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32, of any strides; K is a multiple of 16.
        global_scale: float32 of one element, positive, a factor of the decoded values: the inverse of the argument of
            FlashInfer's and vLLM's quantisers. None computes it: the tensor's largest magnitude / 2688.
        out: destination of the codes, uint8 ``[..., K / 2]``.
        out_scale: destination of the scales, float8_e4m3fn ``[..., K / 16]``.
        out_global_scale: destination of the global scale, where none is given.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        Codes, uint8 ``[..., K / 2]``, the first of two in the low four bits; scales, float8_e4m3fn ``[..., K / 16]``,
        row by row, not swizzled; the global scale, ``[1]`` or the given one. Zeros, denormals, infinity and
        NaN have defined results (see `kernelhub.ops.quant`).

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        Pretraining Large Language Models with NVFP4 (NVIDIA 2025), appendix on quantisation; ModelOpt's checkpoints.

    Example:
        >>> import torch, kernelhub
        >>> codes, scale, global_scale = kernelhub.quantize_nvfp4(torch.randn(4, 64))
        >>> codes.shape, scale.shape
        (torch.Size([4, 32]), torch.Size([4, 4]))
    """
    if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, DryRun):
        traced: tuple[Tensor, Tensor, Tensor] = _quantize.traced(**locals())
        return traced
    if _quantize.again is not None:
        again: tuple[Tensor, Tensor, Tensor] | None = _quantize.again(
            x, global_scale, out, out_scale, out_global_scale, backend
        )
        if again is not None:
            return again
    try:
        key = (x.dtype, global_scale is not None)
    except AttributeError:
        check_nvfp4(x, global_scale)
        raise
    plain = backend is None and not (_contexts_used and _contexts())
    run = _quantize.table.get(key) if plain else _quantize.override(key, backend)
    if run is None:
        check_nvfp4(x, global_scale)
        if isinstance(backend, DryRun):
            check_nvfp4_destinations(x, global_scale, out, out_scale, out_global_scale)
        run = _quantize.decide(key, x.get_device(), backend)
    result: _Three = run(x, global_scale, out, out_scale, out_global_scale)
    return result


@publish(_dequantize, prepares(_dequantize, DequantizeNvfp4Plan), traced=Traced(dequantized_fp4))
def dequantize_nvfp4(
    x: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Turn NVFP4 codes and their scales back into floats.

    Args:
        x: codes, uint8 or float4_e2m1fn_x2 ``[..., K / 2]``, the first of two in the low four bits.
        scale: float8_e4m3fn ``[..., K / 16]``, row by row, not swizzled.
        global_scale: float32 of one element, a factor of the decoded values.
        out_dtype: bfloat16, float16 or float32.
        out: destination ``[..., K]``.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        ``code * scale * global_scale`` ``[..., K]``, rounded to float32, then to `out_dtype`.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        ModelOpt's NVFP4 checkpoints, whose ``weight_scale_2`` is the global scale.

    Example:
        >>> import torch, kernelhub
        >>> x = torch.tensor([[0.5, -6.0, 3.0, 0.0] * 4])
        >>> kernelhub.dequantize_nvfp4(*kernelhub.quantize_nvfp4(x, torch.ones(1))).float().equal(x)
        True
    """
    if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, DryRun):
        traced: Tensor = _dequantize.traced(**locals())
        return traced
    if _dequantize.again is not None:
        again: Tensor | None = _dequantize.again(x, scale, global_scale, out_dtype, out, backend)
        if again is not None:
            return again
    try:
        key = (out_dtype, x.ndim > 0)
        hash(key)
    except (AttributeError, TypeError, RuntimeError):
        check_dequantize("dequantize_nvfp4", x, scale, global_scale, out_dtype)
        raise
    plain = backend is None and not (_contexts_used and _contexts())
    run = _dequantize.table.get(key) if plain else _dequantize.override(key, backend)
    if run is None:
        check_dequantize("dequantize_nvfp4", x, scale, global_scale, out_dtype)
        run = _dequantize.decide(key, x.get_device(), backend)
    result: Tensor = run(x, scale, global_scale, out)
    return result
