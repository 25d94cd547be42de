"""`bmm_fp8`: a product of float8 matrices for each of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, is_grad_enabled

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import check_wants_no_gradient, describe, dtype_name
from kernelhub.ops.call_plan import CallPlan, Fixed, prepares
from kernelhub.ops.formats import E4M3, E5M2
from kernelhub.ops.gemm.fp8.batched.adapter import BmmFp8Adapter
from kernelhub.ops.gemm.fp8.batched.problem import BATCH, BMM_FP8, TENSOR, BmmFp8Problem
from kernelhub.ops.gemm.fp8.batched.reference import bmm_fp8_reference
from kernelhub.ops.gemm.fp8.problem import FLOATS
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.operands import check_destination, check_operand, check_own_memory, transformed
from kernelhub.ops.operators import Traced
from kernelhub.probes.device import facts_of

NAME = "bmm_fp8"
_READ = ("a", "b", "a_scale", "b_scale")
_OF_ALL = ((), (1,), (1, 1), (1, 1, 1))  # shapes of a scale
_FLOATS = tuple(getattr(torch, name) for name in FLOATS)


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def problem_of(key: Any, device: int) -> BmmFp8Problem:
    """The problem that a key means on a device; the key is built in `bmm_fp8`."""
    of_a, of_b, n, k, a_per_matrix, b_per_matrix, out_dtype = key
    return BmmFp8Problem(
        device=facts_of(device),
        a_scaling=BATCH if a_per_matrix else TENSOR,
        b_scaling=BATCH if b_per_matrix else TENSOR,
        n=n,
        k=k,
        out_dtype=dtype_name(out_dtype),
        e5m2=_e5m2(of_a, of_b),
    )


def check(a: Any, b: Any, a_scale: Any, b_scale: Any, out_dtype: Any, out: Any) -> None:
    """Everything that the contract says of a call."""
    operands = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}
    for parameter, tensor in operands.items():
        check_operand(NAME, parameter, tensor)
    if out_dtype not in _FLOATS:
        refuse("out_dtype", f"is {out_dtype}", f"give torch.{', torch.'.join(FLOATS)}")
    for parameter, tensor, shape in (("a", a, "[B, M, K]"), ("b", b, "[B, N, K]")):
        if tensor.ndim != 3:
            refuse(parameter, f"has shape {list(tensor.shape)}", f"give {shape}")
        if tensor.dtype not in (E4M3, E5M2):
            refuse(
                parameter, f"has dtype {dtype_name(tensor.dtype)}", "give float8_e4m3fn, or one of two in float8_e5m2"
            )
    if a.dtype is b.dtype is E5M2:
        refuse("b", "has dtype float8_e5m2, as a has", "give float8_e4m3fn: one of the two may be float8_e5m2")
    batch, n, k = b.shape
    if 0 in (n, k):
        refuse("b", f"has shape {list(b.shape)}", "give at least one row and one column")
    if (a.shape[0], a.shape[2]) != (batch, k):
        hint = "; b is [B, N, K]: transpose one of [B, K, N]" if a.shape[2] == n and n != k else ""
        refuse("a", f"has shape {list(a.shape)}", f"b has {list(b.shape)}: give [{batch}, M, {k}]{hint}")
    for parameter in ("a_scale", "b_scale"):
        scale = operands[parameter]
        if scale.dtype is not torch.float32 or tuple(scale.shape) not in (*_OF_ALL, *_of_each(batch)):
            legal = f"float32 [] for all, or [{batch}] or [{batch}, 1, 1] for each matrix"
            refuse(parameter, f"is {describe(scale)}", f"give {legal}")
    for parameter, tensor in operands.items():
        if tensor.device != a.device:
            refuse(parameter, f"is on {tensor.device}", f"move it to {a.device}, where a is")
        check_wants_no_gradient(NAME, parameter, tensor)
    if out is not None:
        check_destination(NAME, "out", out, (batch, a.shape[1], n), out_dtype, a.device, operands)


def bind(
    adapter: Any,
    problem: BmmFp8Problem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the destination, the launch."""
    launch, calls, repeats = adapter.launch, KnownCalls(adapter.launch), is_repeated(adapter)
    recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds
    n, k = problem.n, problem.k
    dtype = getattr(torch, problem.out_dtype)
    of_a, of_b = (E5M2 if problem.e5m2 == name else E4M3 for name in ("a", "b"))
    per_matrix = (problem.a_scaling == BATCH, problem.b_scaling == BATCH)

    def alike(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor | None) -> bool:
        """Nothing that `check` or `check_form` would refuse."""
        grad = is_grad_enabled()
        for tensor in (a, b, a_scale, b_scale) if out is None else (a, b, a_scale, b_scale, out):
            if type(tensor) is not Tensor or tensor.get_device() != device or tensor.is_meta or tensor.is_nested:
                return False
            if grad and tensor.requires_grad:
                return False
        if a.dtype is not of_a or b.dtype is not of_b or a.ndim != 3 or b.ndim != 3:
            return False
        batch, rows, width = a.shape
        if width != k or b.shape != (batch, n, k):
            return False
        for scale, each in ((a_scale, per_matrix[0]), (b_scale, per_matrix[1])):
            shape = tuple(scale.shape)
            legal = _of_each(batch) if each else _OF_ALL
            if scale.dtype is not torch.float32 or shape not in legal:
                return False
        return out is None or (out.dtype is dtype and out.shape == (batch, rows, n))

    def run(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor | None) -> Tensor:
        if a.get_device() != device:
            result: Tensor = elsewhere(a.get_device())(a, b, a_scale, b_scale, out)
            return result
        given, key, again, made = (a, b, a_scale, b_scale), None, 0, out
        if not a.is_nested:
            key = a.shape, out is None
            if out is None and key in calls and a.layout is torch.strided:
                made = a.new_empty(*a.shape[:2], n, dtype=dtype)
            if made is not None:
                again = recognise(key, (*given, made))
                if again == 2:
                    tick()
                    return made
        if again:
            pass
        elif key is None or transformed() or not alike(a, b, a_scale, b_scale, out):
            check(a, b, a_scale, b_scale, dtype, out)
            check_form(a, b, a_scale, b_scale, problem)
        else:
            try:
                loose = not (a_scale.is_contiguous() and b_scale.is_contiguous())
            except RuntimeError:  # compressed rows cannot say
                loose = True
            if loose or a_scale.is_neg() or b_scale.is_neg():
                check(a, b, a_scale, b_scale, dtype, out)
            if out is not None:
                check_own_memory(NAME, "out", out, _READ, (a, b, a_scale, b_scale))
        if made is None:
            made = a.new_empty(*a.shape[:2], n, dtype=dtype)
        if not again:
            calls.learn(key, (*given, made), 1)
        if made.numel():
            tick()
            try:
                launch(*given, made)
            except Exception as error:
                failed(launch, error)
                raise
            if again and repeats:
                calls.attach(key, (*given, made), adapter.repeated, *given, made)
        return made

    return run


def _of_each(batch: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of a scale for each matrix."""
    return (batch,), (batch, 1), (batch, 1, 1)


def per_matrix(scale: Tensor) -> bool:
    """Whether there is a scale for each matrix. One of a batch of one is a scale of all."""
    return bool(scale.ndim and scale.shape[0] != 1)


def _e5m2(of_a: torch.dtype, of_b: torch.dtype) -> str | None:
    """The operands that are float8_e5m2."""
    return "a" if of_a is E5M2 else "b" if of_b is E5M2 else None


def check_form(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, problem: BmmFp8Problem) -> None:
    """Operands are those that the kernel was made for: a plan may be run with others than it was prepared for."""
    if _e5m2(a.dtype, b.dtype) != problem.e5m2:
        dtypes = " by ".join(dtype_name(E5M2 if problem.e5m2 == name else E4M3) for name in ("a", "b"))
        refuse("a", f"is {dtype_name(a.dtype)} and b {dtype_name(b.dtype)}", f"the plan is for {dtypes}")
    form = (*b.shape[1:], *(BATCH if per_matrix(scale) else TENSOR for scale in (a_scale, b_scale)))
    wanted = (problem.n, problem.k, problem.a_scaling, problem.b_scaling)
    if form != wanted:
        found = f"is {describe(b)} with scales {describe(a_scale)} and {describe(b_scale)}"
        refuse("b", found, f"the plan is for [B, {problem.n}, {problem.k}], scaled by {wanted[2]} and {wanted[3]}")


_op: Op[BmmFp8Problem] = Op(
    Contract.of(
        BMM_FP8,
        problem_of=problem_of,
        adapter=BmmFp8Adapter,
        bind=bind,
        reference=bmm_fp8_reference,
        example="kernelhub.ops.gemm.fp8.batched.inputs:bmm_fp8_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class BmmFp8Plan(CallPlan):
    """A kernel selected for operands like these: ``run(a, b, a_scale, b_scale, out=None)`` is a whole call."""

    __slots__ = ()
    call = "a, b, a_scale, b_scale, out"
    fixed: ClassVar[Fixed] = {"out_dtype": lambda problem: getattr(torch, problem.out_dtype)}


def _memory(a: Tensor, b: Tensor, out_dtype: torch.dtype, **others: Any) -> dict[str, Tensor]:
    return {"out": a.new_empty((*a.shape[:2], b.shape[1]), dtype=out_dtype)}


@publish(_op, prepares(_op, BmmFp8Plan), traced=Traced(_memory))
def bmm_fp8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Multiply a batch of float8 matrices, with one scale or one per matrix: ``(a[i] * a_scale) @ (b[i] * b_scale).T``.

    Args:
        a: ``[B, M, K]``, float8_e4m3fn, or float8_e5m2 if b is not. In latent attention B is the heads: a view of
            ``[M, B, K]``.
        b: ``[B, N, K]``, float8_e4m3fn, or float8_e5m2 if a is not: weights as in checkpoints. FlashInfer's function
            takes ``[B, K, N]`` in column-major order, which is the same memory: give ``its_b.transpose(1, 2)``.
        a_scale: float32 ``[]`` or ``[1]`` for all matrices, or ``[B]``, one per matrix; further dimensions of size 1
            are allowed, as in ``[1, 1]`` and ``[B, 1, 1]``.
        b_scale: the same for b.
        out_dtype: bfloat16, float16 or float32.
        out: destination ``[B, M, N]`` in `out_dtype`, of any strides. It must not overlap the operands.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        ``[B, M, N]`` in `out_dtype`.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        The absorbed projections of latent attention (DeepSeek-V2, section 2.1); FlashInfer's function of the same name.

    Example:
        >>> import torch, kernelhub
        >>> from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
        >>> call = bmm_fp8_inputs(batch=4, tokens=3)
        >>> kernelhub.bmm_fp8(**call).shape
        torch.Size([4, 3, 512])
    """
    if type(a) is not Tensor and isinstance(a, Tensor) and not isinstance(backend, DryRun):
        traced: Tensor = _op.traced(**locals())
        return traced
    if _op.again is not None:
        again: Tensor | None = _op.again(a, b, a_scale, b_scale, out_dtype, out, backend)
        if again is not None:
            return again
    try:
        _, rows, columns = b.shape
        key = (
            a.dtype,
            b.dtype,
            rows,
            columns,
            a_scale.ndim != 0 and a_scale.shape[0] != 1,
            b_scale.ndim != 0 and b_scale.shape[0] != 1,
            out_dtype,
        )
        run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        check(a, b, a_scale, b_scale, out_dtype, out)
        raise
    if run is None:
        check(a, b, a_scale, b_scale, out_dtype, out)
        run = _op.decide(key, a.get_device(), backend)
    result: Tensor = run(a, b, a_scale, b_scale, out)
    return result
