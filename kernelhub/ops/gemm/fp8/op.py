"""`fp8_gemm`: a product of float8 matrices, scaled by tensor, row or block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.ops.arguments import Forms, alike, check_is_tensor, dtype_name, usable
from kernelhub.ops.call_plan import CallPlan, Fixed
from kernelhub.ops.formats import E4M3, E5M2
from kernelhub.ops.gemm.fp8.adapter import Fp8GemmAdapter
from kernelhub.ops.gemm.fp8.checks import NAME, check, check_form, facts_of_weight, form_of_a, refuse
from kernelhub.ops.gemm.fp8.problem import (
    BLOCK,
    E8M0,
    FEW,
    FLOAT,
    FP8_GEMM,
    GROUP,
    MOST_FEW,
    ROW,
    TENSOR,
    Fp8GemmProblem,
    rows_of,
)
from kernelhub.ops.gemm.fp8.reference import fp8_gemm_reference
from kernelhub.ops.gemm.fp8.scaling import by_rows, of_rows, scaling_of_form
from kernelhub.ops.known_calls import KnownCalls
from kernelhub.ops.operands import check_loose, check_own_memory, transformed
from kernelhub.ops.operators import Traced
from kernelhub.ops.packed import PackedWeight, PackingPlan, prepared
from kernelhub.probes.device import facts_of

_VECTORS = ("a_scale", "b_scale", "bias")
_READ = ("a", "b", *_VECTORS)


def problem_of(key: Any, device: int) -> Fp8GemmProblem:
    """The problem that a key means on a device; the key is built in `fp8_gemm`."""
    of_a, n, k, (a_dtype, rank, last), (b_dtype, b_shape), out_dtype, has_bias, rows, layout = key
    return Fp8GemmProblem(
        device=facts_of(device),
        scaling=str(scaling_of_form(a_dtype, rank, last, b_dtype, b_shape, n, k)),
        n=n,
        k=k,
        rows=rows,
        out_dtype=dtype_name(out_dtype),
        a_scale_dtype=FLOAT if a_dtype in (None, torch.float32) else E8M0,
        b_scale_dtype=FLOAT if b_dtype is torch.float32 else E8M0,
        weight_layout=layout,
        weight_only=None if of_a in (E4M3, E5M2) else dtype_name(of_a),
        e5m2=of_a is E5M2,
        bias=has_bias,
    )


def with_layout(key: Any, layout: str) -> Any:
    """The key of the same call with a weight of another layout."""
    return (*key[:-1], layout)


def bind(
    adapter: Any,
    problem: Fp8GemmProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the destination, the launch."""
    if problem.weight_only is not None:
        return _bind_weights(adapter, problem, device, tick, elsewhere)
    launch = adapter.launch
    n, k = problem.n, problem.k
    dtype = getattr(torch, problem.out_dtype)
    of_a = E5M2 if problem.e5m2 else E4M3
    flat = problem.scaling in (TENSOR, ROW)
    single = flat or k <= GROUP[BLOCK]  # then scales may have one element, contiguous whatever they are a view of
    calls = KnownCalls(adapter.launch)
    # An audit replaces `launch`, and sees all calls.
    repeats = type(adapter).repeated is not Fp8GemmAdapter.repeated and "launch" not in vars(adapter)
    recognise = calls.launches if repeats else calls.holds
    seen: set[Any] = set()  # forms of scales that the problem means: a few, whatever the number of rows

    def known(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor | None) -> bool:
        """Nothing that `check` or `check_form` would refuse."""
        if not usable(a, of_a, device) or a.ndim != 2 or not alike(b, (n, k), E4M3, device):
            return False
        rows, columns = a.shape
        if not isinstance(a_scale, Tensor) or not isinstance(b_scale, Tensor):
            return False
        a_dtype, b_dtype, a_form = a_scale.dtype, b_scale.dtype, a_scale.shape
        if columns != k or not usable(a_scale, a_dtype, device) or not usable(b_scale, b_dtype, device):
            return False
        rank = len(a_form)
        last = 1 if rank == 0 else a_form[1] if rank == 2 else int(a_form[0] == 1)
        if (a_dtype, rank, last, b_dtype, b_scale.shape, bias is None) not in seen:
            return False
        if rank and a_form[0] != rows and (rank == 2 or a_form[0] != 1):
            return False
        return (bias is None or alike(bias, (n,), dtype, device)) and (
            out is None or alike(out, (rows, n), dtype, device)
        )

    def run(
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        bias: Tensor | None,
        out: Tensor | None,
        checked: bool = False,
    ) -> Tensor:
        """`checked`: the call was checked, and this function made for it."""
        if a.get_device() != device:
            result: Tensor = elsewhere(a.get_device())(a, b, a_scale, b_scale, bias, out)
            return result
        scales = a_scale, b_scale
        key = None if a.is_nested else a.shape
        made = a.new_empty(a.shape[0], n, dtype=dtype) if out is None and key in calls else out
        state: int = False
        if made is not None:
            state = recognise(key, (a, b, *scales, bias, made))
            if state == 2:
                tick()
                return made
        if not state:
            if transformed() or not known(a, b, a_scale, b_scale, bias, out):
                a_scale = of_rows(a, a_scale)
                if not checked:
                    check(a, b, a_scale, b_scale, bias, dtype, out)
                    if a.dtype is not of_a:
                        refuse("a", f"has dtype {dtype_name(a.dtype)}", f"the plan is for {dtype_name(of_a)}")
                    check_form(b, a_scale, b_scale, bias, problem)
                seen.add((*form_of_a(a_scale), b_scale.dtype, b_scale.shape, bias is None))
            else:
                check_loose(NAME, _VECTORS, (a_scale, b_scale, bias))
                if single and (a_scale.is_neg() or b_scale.is_neg()):
                    check(a, b, a_scale, b_scale, bias, dtype, out)
                if n == 1 and bias is not None and bias.is_neg():
                    check(a, b, a_scale, b_scale, bias, dtype, out)
                if out is not None:
                    check_own_memory(NAME, "out", out, _READ, (a, b, a_scale, b_scale, bias))
        out = a.new_empty(a.shape[0], n, dtype=dtype) if made is None else made
        if not state:
            calls.learn(key if a_scale is scales[0] else None, (a, b, *scales, bias, out), 1)
        if flat and b_scale.ndim == 2:
            b_scale = by_rows(b_scale, problem.scaling)
        if out.shape[0]:
            tick()
            try:
                launch(a, b, a_scale, b_scale, bias, out)
            except Exception as error:
                failed(launch, error)
                raise
            if state and repeats:
                calls.attach(key, (a, b, *scales, bias, out), adapter.repeated, a, b, a_scale, b_scale, bias, out)
        return out

    return run


def _bind_weights(
    adapter: Any,
    problem: Fp8GemmProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The same of activations that are not quantised."""
    launch, n = adapter.launch_weights, problem.n
    dtype, of_a = getattr(torch, problem.out_dtype), getattr(torch, str(problem.weight_only))
    forms = Forms(device)

    def run(
        a: Tensor,
        b: Tensor | PackedWeight,
        a_scale: Tensor | None,
        b_scale: Tensor | None,
        bias: Tensor | None,
        out: Tensor | None,
        checked: bool = False,
    ) -> Tensor:
        """`checked` is as above."""
        if a.get_device() != device:
            result: Tensor = elsewhere(a.get_device())(a, b, a_scale, b_scale, bias, out)
            return result
        given: tuple[Any, ...] = (b, b_scale)
        about: tuple[Any, ...] = ()
        if isinstance(b, PackedWeight):
            given, about = tuple(b.tensors.values()), (b.op, b.layout, b.shape, b.facts["scale"])
        form = forms.of((a, *given, a_scale, bias, out), b_scale is None, *about)
        if form is None or form not in forms or transformed():
            if not checked:
                check(a, b, a_scale, b_scale, bias, dtype, out)
                if a.dtype is not of_a:
                    refuse("a", f"has dtype {dtype_name(a.dtype)}", f"the plan is for {problem.weight_only}")
                check_form(b, a_scale, b_scale, bias, problem)
            forms.add(form)
        else:
            check_loose(NAME, ("a", "b_scale", "bias"), (a, b_scale, bias))
            for factor in (b_scale, a if problem.k == 1 else None, bias if n == 1 else None):
                if factor is not None and factor.is_neg():
                    check(a, b, a_scale, b_scale, bias, dtype, out)
            if out is not None:
                check_own_memory(NAME, "out", out, ("a", "bias", *("b",) * len(given)), (a, bias, *given))
        if b_scale is not None and b_scale.ndim == 2:
            given = (b, by_rows(b_scale, problem.scaling))
        if out is None:
            out = a.new_empty(a.shape[0], n, dtype=dtype)
        if out.shape[0]:
            tick()
            try:
                launch(a, *given, bias, out)
            except Exception as error:
                failed(launch, error)
                raise
        return out

    return run


_op: Op[Fp8GemmProblem] = Op(
    Contract.of(
        FP8_GEMM,
        problem_of=problem_of,
        adapter=Fp8GemmAdapter,
        bind=bind,
        reference=fp8_gemm_reference,
        example="kernelhub.ops.gemm.fp8.inputs:fp8_gemm_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class Fp8GemmPlan(CallPlan, PackingPlan):
    """A kernel selected for weights like these: ``run(a, b=None, a_scale=None, b_scale=None, bias=None, out=None)``.

    A run is a whole call. Without b, b_scale and bias it takes those that the plan was prepared with, which it keeps
    alive. Beside activations that are not quantised `pack` returns the weight in the kernel's layout.
    """

    __slots__ = ()
    call = "a, b, a_scale, b_scale, bias, out"
    weights = ("b", "b_scale", "bias")
    fixed: ClassVar[Fixed] = {"out_dtype": lambda problem: getattr(torch, problem.out_dtype)}

    def pack(self, b: Tensor, b_scale: Tensor) -> PackedWeight:
        """The weight in the layout that this plan's kernel reads fastest, for `fp8_gemm` in place of b.

        Args:
            b, b_scale: as of `fp8_gemm`.

        Raises:
            InvalidArgument: they are no weight that the plan was prepared for; activations are quantised, for which
                no kernel packs; or the kernel's format does not hold these scales.
        """
        problem = self.selection.problem
        if problem.weight_only is None:
            refuse("b", "is to be packed", "prepare the plan with bfloat16 or float16 activations")
        check_is_tensor(NAME, "b", b)
        a = torch.empty(0, problem.k, dtype=getattr(torch, problem.weight_only), device=b.device)
        check(a, b, None, b_scale, None, getattr(torch, problem.out_dtype), None)
        return self._pack({"codes": b, "scale": b_scale}, facts_of_weight(b, b_scale, problem))


def _prepare(*args: Any, backend: Backend = None, packing: bool = False, **kwargs: Any) -> Fp8GemmPlan:
    """Choose once for operands like these: arguments as of `fp8_gemm`.

    With `packing` the weight is as in a checkpoint, and the caller packs it with the plan's `pack` before it runs:
    kernels that need that are ranked with the others, and the plan runs what its `pack` gives. Only weights beside
    activations that are not quantised can be packed; others are left as they are.
    """
    parsed = _op.parse(backend, args, kwargs)

    def make(bound: Bound) -> Fp8GemmPlan:
        plan = Fp8GemmPlan(_op, bound, parsed)
        if packing and isinstance(weight := parsed.arguments[1], Tensor) and not parsed.shapes & set(plan.weights):
            plan.check_packs(weight, parsed.arguments[3])
        return plan

    return prepared(_op, parsed, backend, with_layout, packing, make)


def _memory(a: Tensor, b: Tensor | PackedWeight, out_dtype: torch.dtype, **others: Any) -> dict[str, Tensor]:
    return {"out": a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)}


@publish(_op, _prepare, traced=Traced(_memory))
def fp8_gemm(
    a: Tensor,
    b: Tensor | PackedWeight,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Multiply activations by float8 weights, scaled: ``(a * a_scale) @ (b * b_scale).T + bias``.

    The shapes of the scales determine the granularity: per tensor; per row of a (token), of b (channel) or of both; in
    blocks of 1 x 128 of a and 128 x 128 or 1 x 128 of b; in blocks of 1 x 32 of both (MXFP8). Activations that are not
    quantised have no scale; weights then have one, one per row, or one per 128 x 128 or 1 x 128. M, N and K need not be
    multiples of the block: the last blocks may be smaller.

    Args:
        a: activations ``[M, K]``, float8_e4m3fn or float8_e5m2; or bfloat16 or float16, if only the weights are
            quantised.
        b: weights ``[N, K]``, float8_e4m3fn, as in checkpoints; or, with a in bfloat16 or float16, the packed weight
            that a plan's `pack` returned, which contains its scale.
        a_scale: float32 ``[]``, ``[1]`` or ``[1, 1]`` for all; float32 ``[M]`` or ``[M, 1]`` per token; float32 or
            float8_e8m0fnu ``[M, ceil(K/128)]``, or ``[ceil(M/128), ceil(K/128)]``, which is expanded to tokens;
            float8_e8m0fnu ``[M, ceil(K/32)]``. Any strides: for transposed (MN-major) scales ``[ceil(K/128), M]`` give
            the view ``a_scale.t()``. None if a is bfloat16 or float16.
        b_scale: in the same order float32 ``[]``, ``[1]`` or ``[1, 1]``; float32 ``[N]``, ``[N, 1]`` or ``[1, N]`` per
            channel; float32 or float8_e8m0fnu ``[ceil(N/128), ceil(K/128)]`` or ``[N, ceil(K/128)]``, for transposed
            scales the view ``b_scale.t()``; float8_e8m0fnu ``[N, ceil(K/32)]``. uint8 bytes are accepted for
            float8_e8m0fnu.
        bias: ``[N]`` in `out_dtype`.
        out_dtype: bfloat16, float16 or float32.
        out: destination ``[M, N]`` in `out_dtype`. It must not overlap the operands.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        ``[M, N]`` in `out_dtype`.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        Checkpoints of DeepSeek-V3 (``weight_scale_inv``, which multiplies, section 3.3 of its report) and of
        compressed-tensors; OCP Microscaling Formats 1.0.

    Example:
        >>> import torch, kernelhub
        >>> from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
        >>> call = fp8_gemm_inputs(tokens=3, n=256, k=512)
        >>> [list(call[name].shape) for name in ("a", "b", "a_scale", "b_scale")]
        [[3, 512], [256, 512], [3, 4], [2, 4]]
        >>> kernelhub.fp8_gemm(**call).shape
        torch.Size([3, 256])
    """
    if type(a) is not Tensor and isinstance(a, Tensor) and not isinstance(backend, DryRun):
        traced: Tensor = _op.traced(**locals())
        return traced
    if _op.again is not None:
        again: Tensor | None = _op.again(a, b, a_scale, b_scale, bias, out_dtype, out, backend)
        if again is not None:
            return again
    try:
        rows, columns = b.shape
        of_a: tuple[torch.dtype | None, int, int] = (None, 0, 0)
        if a_scale is not None:
            rank = a_scale.ndim
            if rank == 2 and a_scale.shape[0] != a.shape[0]:
                a_scale = of_rows(a, a_scale)
                rank = a_scale.ndim
            last = 1 if rank == 0 else a_scale.shape[1] if rank == 2 else int(a_scale.shape[0] == 1)
            of_a = (a_scale.dtype, rank, last)
        layout = CHECKPOINT
        if isinstance(b, PackedWeight):
            of_b, layout = b.facts["scale"], b.layout
        else:
            of_b = (b_scale.dtype, b_scale.shape)  # type: ignore[union-attr]
        key = (
            a.dtype,
            rows,
            columns,
            of_a,
            of_b,
            out_dtype,
            bias is not None,
            FEW if a.shape[0] <= MOST_FEW else rows_of(a.shape[0]),
            layout,
        )
        run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    except (AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError):
        check(a, b, a_scale, b_scale, bias, out_dtype, out)
        raise
    if run is None:
        check(a, b, a_scale, b_scale, bias, out_dtype, out)
        fresh: Tensor = _op.decide(key, a.get_device(), backend)(a, b, a_scale, b_scale, bias, out, True)
        return fresh
    result: Tensor = run(a, b, a_scale, b_scale, bias, out)
    return result
