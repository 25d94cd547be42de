"""`fp4_gemm`: activations times a float4 weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import Forms, check_wants_no_gradient, describe, dtype_name
from kernelhub.ops.call_plan import CallPlan, Fixed
from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.gemm.fp4.adapter import Activations, Fp4GemmAdapter, Weights
from kernelhub.ops.gemm.fp4.problem import (
    FEW,
    FP4_GEMM,
    FP8,
    GROUP,
    MOST_FEW,
    MXFP4,
    MXFP8,
    NVFP4,
    OUT_DTYPES,
    Fp4GemmProblem,
    multiple_of_k,
    rows_of,
)
from kernelhub.ops.gemm.fp4.reference import BYTES, EXPONENTS, a_format_of, fp4_format_of, fp4_gemm_reference
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.operands import check_destination, check_loose, check_operand, check_own_memory, transformed
from kernelhub.ops.operators import Traced
from kernelhub.ops.packed import PackedWeight, PackingPlan, layout_of, prepared
from kernelhub.probes.device import facts_of

NAME = "fp4_gemm"
_OUT = tuple(getattr(torch, name) for name in OUT_DTYPES)
_NAMES = dict(zip(_OUT, OUT_DTYPES, strict=True))
_READ = ("a", "a_scale", "b_scale", "a_global_scale", "b_global_scale", "bias")


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def key_of(
    a: Tensor, b: Tensor | PackedWeight, a_scale: Tensor | None, b_scale: Tensor | None, bias: Any, out_dtype: Any
) -> Any:
    """The key of a call. Whatever is wrong with the arguments, `check` says."""
    if isinstance(b, PackedWeight):
        b_format: str = b.facts["format"]
    else:
        b_format = fp4_format_of(b_scale)
    n, half = b.shape
    shape = a.shape
    count = shape[0] if len(shape) == 2 else shape[:-1].numel()
    rows = FEW if count <= MOST_FEW else rows_of(count)
    dtype = _NAMES.get(out_dtype) or str(out_dtype)[6:]
    return a_format_of(a, a_scale), b_format, dtype, n, 2 * half, rows, layout_of(b), bias is not None


def with_layout(key: Any, layout: str) -> Any:
    """The key of the same call with a weight of another layout."""
    return (*key[:6], layout, *key[7:])


def problem_of(key: Any, device: int) -> Fp4GemmProblem:
    """The problem that a key means on a device."""
    where = facts_of(device)
    return Fp4GemmProblem(where, *key)


def _check_tensor(parameter: str, tensor: Any, dtypes: Sequence[torch.dtype], like: Tensor | None) -> None:
    """A tensor of one of these dtypes, on the device of `like`, that requires no gradient."""
    check_operand(NAME, parameter, tensor)
    if tensor.dtype not in dtypes:
        refuse(parameter, f"has dtype {dtype_name(tensor.dtype)}", f"give {' or '.join(map(dtype_name, dtypes))}")
    if like is not None and tensor.device != like.device:
        refuse(parameter, f"is on {tensor.device}", f"move it to {like.device}, where a is")
    check_wants_no_gradient(NAME, parameter, tensor)


def check_weight(b: Any, b_scale: Any, b_global_scale: Any, like: Tensor | None) -> str:
    """Check a weight in the checkpoint's layout; return its format."""
    _check_tensor("b", b, BYTES, like)
    if b.ndim != 2 or 0 in b.shape:
        refuse("b", f"has shape {list(b.shape)}", "give [N, K / 2] with at least one element")
    _check_tensor("b_scale", b_scale, (E4M3, *EXPONENTS), b)
    form = fp4_format_of(b_scale)
    _check_columns("b", b.shape[1], GROUP[form] // 2, form)
    _check_scale("b_scale", b_scale, (b.shape[0], b.shape[1] * 2 // GROUP[form]), form)
    _check_global("b_global_scale", b_global_scale, form, b)
    return form


def _check_activations(a: Any, a_scale: Any, a_global_scale: Any) -> str:
    """Check the operand a; return its format."""
    _check_tensor("a", a, (torch.bfloat16, torch.float16, E4M3, *BYTES), None)
    if a.ndim < 1:
        refuse("a", "has no dimension", "give [..., K]")
    if a.dtype in (torch.bfloat16, torch.float16):
        if a_scale is not None:
            refuse("a_scale", f"is given for {dtype_name(a.dtype)}", "only fp8 and float4 have scales")
        form = dtype_name(a.dtype)
    else:
        wanted = (torch.float32, *EXPONENTS) if a.dtype is E4M3 else (E4M3, *EXPONENTS)
        _check_tensor("a_scale", a_scale, wanted, a)
        form = a_format_of(a, a_scale)
    lead, width = tuple(a.shape[:-1]), a.shape[-1]
    if form in (NVFP4, MXFP4, MXFP8):
        per_byte = 1 if form == MXFP8 else 2
        _check_columns("a", width, GROUP[form] // per_byte, form)
        _check_scale("a_scale", a_scale, (*lead, width * per_byte // GROUP[form]), form)
    elif form == FP8 and a_scale.numel() != 1 and tuple(a_scale.shape) not in (lead, (*lead, 1)):
        refuse("a_scale", f"is {describe(a_scale)}", f"give float32 of one element or {[*lead, 1]}")
    _check_global("a_global_scale", a_global_scale, form, a)
    return form


def check(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    a_global_scale: Any,
    b_global_scale: Any,
    bias: Any,
    out_dtype: Any,
    out: Any,
) -> None:
    """Everything that the contract says of a call."""
    a_format = _check_activations(a, a_scale, a_global_scale)
    if isinstance(b, PackedWeight):
        _check_packed(b, b_scale, b_global_scale, a)
        (n, half), b_format = b.shape, b.facts["format"]
    else:
        b_format = check_weight(b, b_scale, b_global_scale, a)
        n, half = b.shape
    k = a.shape[-1] * (2 if a_format in (NVFP4, MXFP4) else 1)
    if k != 2 * half:
        refuse("a", f"is {describe(a)}, {k} elements a row", f"b has {2 * half}")
    multiple = multiple_of_k(a_format, b_format)
    if k % multiple:
        refuse("a", f"has K = {k}", f"{a_format} with {b_format} needs a multiple of {multiple}")
    if out_dtype not in _OUT:
        refuse("out_dtype", f"is {out_dtype}", f"give torch.{', torch.'.join(OUT_DTYPES)}")
    if bias is not None:
        _check_tensor("bias", bias, tuple({torch.float32: 0, out_dtype: 0}), a)
        if tuple(bias.shape) != (n,):
            refuse("bias", f"is {describe(bias)}", f"give [{n}]")
    if out is not None:
        operands = {"a": a, "a_scale": a_scale, "b_scale": b_scale, "a_global_scale": a_global_scale}
        operands |= {"b_global_scale": b_global_scale, "bias": bias}
        operands |= b.tensors if isinstance(b, PackedWeight) else {"b": b}
        check_destination(NAME, "out", out, (*a.shape[:-1], n), out_dtype, a.device, operands)


def _check_packed(b: PackedWeight, b_scale: Any, b_global_scale: Any, a: Tensor) -> None:
    if b.op != NAME:
        refuse("b", f"is packed for {b.op}", f"pack it with a plan of {NAME}")
    for parameter, given in (("b_scale", b_scale), ("b_global_scale", b_global_scale)):
        if given is not None:
            refuse(parameter, "is given beside a packed weight", "the packed weight holds it")
    if b.device != a.device:
        refuse("b", f"is on {b.device}", f"move it to {a.device}, where a is")
    if b.layout == CHECKPOINT:
        check_weight(b.tensors["codes"], b.tensors["scale"], b.tensors["global_scale"], a)


def _check_columns(parameter: str, width: int, multiple: int, form: str) -> None:
    if width % multiple or width == 0:
        up = max(1, -(-width // multiple)) * multiple
        refuse(parameter, f"has {width} columns", f"a group of {form} is {multiple} of them: the nearest is {up}")


def _check_scale(parameter: str, scale: Tensor, shape: tuple[int, ...], form: str) -> None:
    if tuple(scale.shape) != shape:
        refuse(parameter, f"is {describe(scale)}", f"give {list(shape)}, row by row, not swizzled, for {form}")


def _check_global(parameter: str, scale: Any, form: str, like: Tensor) -> None:
    if form != NVFP4:
        if scale is not None:
            refuse(parameter, f"is given for {form}", "only nvfp4 has one")
        return
    if scale is None:
        refuse(parameter, "is missing", "nvfp4 requires it: float32 of one element, a factor")
    _check_tensor(parameter, scale, (torch.float32,), like)
    if scale.numel() != 1:
        refuse(parameter, f"is {describe(scale)}", "give float32 of one element")


def bind(
    adapter: Any,
    problem: Fp4GemmProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the destination, the launch."""
    launch, out_dtype = adapter.launch, getattr(torch, problem.out_dtype)
    forms, n = Forms(device), problem.n
    calls, repeats = KnownCalls(adapter.launch), is_repeated(adapter)
    recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds

    def run(
        a: Tensor,
        b: Tensor | PackedWeight,
        a_scale: Tensor | None,
        b_scale: Tensor | None,
        a_global_scale: Tensor | None,
        b_global_scale: Tensor | None,
        bias: Tensor | None,
        out: Tensor | None,
        checked: bool = False,
    ) -> Tensor:
        """`checked`: the call was checked, and this function made for it."""
        if a.get_device() != device:
            result: Tensor = elsewhere(a.get_device())(
                a, b, a_scale, b_scale, a_global_scale, b_global_scale, bias, out
            )
            return result
        read, key, state = (a, b, a_scale, b_scale, a_global_scale, b_global_scale, bias), None, 0
        made = out
        if not a.is_nested:
            key = a.shape
            if out is None and key in calls and a.layout is torch.strided:
                made = a.new_empty(*key[:-1], n, dtype=out_dtype)
            if made is not None:
                state = recognise(key, (*read, made))
                if state == 2:
                    tick()
                    return made
        if not state:
            rest = (a, a_scale, b_scale, a_global_scale, b_global_scale, bias, out)
            if isinstance(b, PackedWeight):
                form = forms.of((*rest, *b.tensors.values()), b.op, b.layout, b.shape, b.facts["format"])
            else:
                form = forms.of((*rest, b))
            if form is None or form not in forms or transformed():
                if not checked:
                    check(a, b, a_scale, b_scale, a_global_scale, b_global_scale, bias, out_dtype, out)
                    _check_form(problem, a, b, a_scale, b_scale, bias)
                forms.add(form)
            else:
                check_loose(NAME, _READ, rest[:-1])
                if isinstance(b, Tensor):
                    check_loose(NAME, ("b",), (b,))
                for factor in (a_scale, a_global_scale, b_global_scale, bias if n == 1 else None):
                    if factor is not None and factor.is_neg():
                        check(a, b, a_scale, b_scale, a_global_scale, b_global_scale, bias, out_dtype, out)
                if out is not None:
                    _check_out(out, rest[:-1], b)
            if made is None:
                made = a.new_empty(*a.shape[:-1], n, dtype=out_dtype)
            calls.learn(key, (*read, made), 1)
        assert made is not None
        if bias is not None and not bias.is_contiguous():
            bias = bias.contiguous()  # kernels read it element after element
        if made.numel():
            activations, weights = _activations(a, a_scale, a_global_scale), _weights(b, b_scale, b_global_scale)
            launched = activations, weights, bias, made if made.ndim == 2 else _rows_of(made)
            tick()
            try:
                launch(*launched)
            except Exception as error:
                failed(launch, error)
                raise
            if state and repeats:
                calls.attach(key, (*read, made), adapter.repeated, *launched)
        return made

    return run


def _check_out(out: Tensor, operands: tuple[Tensor | None, ...], b: Tensor | PackedWeight) -> None:
    weight = tuple(b.tensors.values()) if isinstance(b, PackedWeight) else (b,)
    check_own_memory(NAME, "out", out, (*_READ, *("b",) * len(weight)), (*operands, *weight))


def _activations(a: Tensor, scale: Tensor | None, global_scale: Tensor | None) -> Activations:
    if a.dtype is torch.float4_e2m1fn_x2:
        a = a.view(torch.uint8)
    if scale is not None:
        if scale.dtype is torch.float32:
            scale = scale.reshape(-1, 1)
        else:
            scale = _exponents(scale)
            scale = scale if scale.ndim == 2 else scale.reshape(-1, scale.shape[-1])
    return Activations(a if a.ndim == 2 else a.reshape(-1, a.shape[-1]), scale, global_scale)


def _weights(b: Tensor | PackedWeight, scale: Tensor | None, global_scale: Tensor | None) -> Weights:
    codes: Tensor | None
    if isinstance(b, PackedWeight):
        codes, scale, global_scale = b.tensors["codes"], b.tensors["scale"], b.tensors["global_scale"]
    else:
        codes = b
    assert codes is not None
    assert scale is not None
    return Weights(codes if codes.dtype is torch.uint8 else codes.view(torch.uint8), _exponents(scale), global_scale)


def _exponents(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8) if scale.dtype is E8M0 else scale


def _rows_of(out: Tensor) -> Tensor:
    try:
        return out.view(-1, out.shape[-1])
    except RuntimeError:
        refuse("out", f"has strides {list(out.stride())}", "give memory whose rows are evenly spaced")


def _check_form(problem: Fp4GemmProblem, a: Tensor, b: Any, a_scale: Any, b_scale: Any, bias: Any) -> None:
    """Operands are those that the kernel was made for: a plan may be run with others than it was prepared for."""
    if layout_of(b) != problem.weight_layout:
        fix = f"the plan is for {problem.weight_layout}; give what its pack() gives, or prepare one with this weight"
        refuse("b", f"is laid out as {layout_of(b)}", fix)
    if (bias is not None) != problem.bias:
        refuse("bias", f"is {'missing' if problem.bias else 'given'}", "prepare a plan for that")
    if a_format_of(a, a_scale) != problem.a_format:
        refuse("a", f"is {a_format_of(a, a_scale)}", f"the plan is for {problem.a_format}")
    form = b.facts["format"] if isinstance(b, PackedWeight) else fp4_format_of(b_scale)
    if (form, *b.shape) != (problem.b_format, problem.n, problem.k // 2):
        wanted = f"{problem.b_format} [{problem.n}, {problem.k} / 2]"
        refuse("b", f"is {form} {list(b.shape)}", f"the plan is for {wanted}")


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


class Fp4GemmPlan(CallPlan, PackingPlan):
    """A kernel selected for operands like these.

    ``run(a, b=None, a_scale=None, b_scale=None, a_global_scale=None, b_global_scale=None, bias=None, out=None)`` is a
    whole call. Without b, its scales and bias it takes those that the plan was prepared with, which it keeps alive.
    `pack` returns the weight in the kernel's layout; a plan prepared with that runs it.
    """

    __slots__ = ()
    call = "a, b, a_scale, b_scale, a_global_scale, b_global_scale, bias, out"
    weights = ("b", "b_scale", "b_global_scale", "bias")
    fixed: ClassVar[Fixed] = {"out_dtype": lambda problem: getattr(torch, problem.out_dtype)}

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
    parsed = _op.parse(backend, args, kwargs)

    def make(bound: Bound) -> Fp4GemmPlan:
        plan = Fp4GemmPlan(_op, bound, parsed)
        if packing and isinstance(weight := parsed.arguments[1], Tensor) and not parsed.shapes & set(plan.weights):
            plan.check_packs(weight, parsed.arguments[3], parsed.arguments[5])
        return plan

    return prepared(_op, parsed, backend, with_layout, packing, make)


def _memory(a: Tensor, b: Tensor | PackedWeight, out_dtype: torch.dtype, **others: Any) -> dict[str, Tensor]:
    return {"out": a.new_empty((*a.shape[:-1], b.shape[0]), dtype=out_dtype)}


@publish(_op, _prepare, traced=Traced(_memory))
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
        b: float4, uint8 or float4_e2m1fn_x2 ``[N, K / 2]``, the first of two in the low four bits; or the packed
            weight that a plan's `pack` returned, which contains its scales.
        a_scale: for float8 a float32 of one element or ``[..., 1]``, or float8_e8m0fnu (or its bytes)
            ``[..., K / 32]`` (MXFP8); for float4 as `b_scale`; None for bfloat16 and float16.
        b_scale: float8_e4m3fn ``[N, K / 16]`` (NVFP4), or float8_e8m0fnu (or its bytes) ``[N, K / 32]`` (MXFP4);
            row by row, not swizzled.
        a_global_scale: float32 of one element, a factor of a, if a is NVFP4.
        b_global_scale: the same for b, if b is NVFP4.
        bias: ``[N]``, float32 or `out_dtype`.
        out_dtype: bfloat16, float16 or float32.
        out: destination ``[..., N]``; it must not overlap the operands.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        ``[..., N]`` in `out_dtype`, accumulated in float32. Some kernels treat elements of MXFP4 and MXFP8 of 2^128 and
        more as infinite, because they exceed float32; there, 0 times such an element is NaN.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        OCP Microscaling Formats (MX) Specification 1.0; the checkpoints of gpt-oss (MXFP4) and ModelOpt (NVFP4).

    Example:
        >>> import torch, kernelhub
        >>> b, scale, factor = kernelhub.quantize_nvfp4(torch.randn(96, 64))
        >>> a = torch.randn(3, 64, dtype=torch.bfloat16)
        >>> kernelhub.fp4_gemm(a, b, b_scale=scale, b_global_scale=factor).shape
        torch.Size([3, 96])
    """
    if type(a) is not Tensor and isinstance(a, Tensor) and not isinstance(backend, DryRun):
        traced: Tensor = _op.traced(**locals())
        return traced
    if _op.again is not None:
        again: Tensor | None = _op.again(
            a, b, a_scale, b_scale, a_global_scale, b_global_scale, bias, out_dtype, out, backend
        )
        if again is not None:
            return again
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
