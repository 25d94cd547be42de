"""`grouped_gemm`: groups of rows, each times the weights of its group."""

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
from kernelhub.ops.arguments import Forms, dtype_name
from kernelhub.ops.call_plan import CallPlan, Fixed, prepares
from kernelhub.ops.gemm.grouped.adapter import GroupedGemmAdapter, GroupedOperands
from kernelhub.ops.gemm.grouped.checks import NAME, Operands, check, check_form, check_lengths, default_out_dtype
from kernelhub.ops.gemm.grouped.problem import FEW, FP4, GROUPED_GEMM, MANY, MOST_FEW, GroupedGemmProblem
from kernelhub.ops.gemm.grouped.reference import grouped_gemm_reference
from kernelhub.ops.gemm.grouped.scales import PACKED, geometry_of_a, geometry_of_b
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.operands import check_loose, check_own_memory, transformed
from kernelhub.ops.operators import Traced
from kernelhub.ops.values import checks_devices
from kernelhub.probes.device import facts_of

_READ = GroupedOperands._fields
_VECTORS = tuple(map(_READ.index, ("offsets", "group_sizes", "a_global_scale", "b_global_scale")))


def problem_of(key: Any, device: int) -> GroupedGemmProblem:
    """The problem that a key means on a device; the key is built in `grouped_gemm`."""
    a_dtype, b_dtype, groups, n, b_columns, many, masked, a_scale, b_scale, a_global, b_global, bias, out_dtype = key
    packed = b_dtype in PACKED
    return GroupedGemmProblem(
        device=facts_of(device),
        a_dtype=FP4 if a_dtype in PACKED else dtype_name(a_dtype),
        b_dtype=FP4 if packed else dtype_name(b_dtype),
        out_dtype=dtype_name(out_dtype),
        num_groups=groups,
        n=n,
        k=2 * b_columns if packed else b_columns,
        rows=MANY if many else FEW,
        masked=masked,
        a_scale=a_scale,
        b_scale=b_scale,
        a_global_scale=a_global,
        global_scale=b_global,
        bias=bias,
    )


def bind(
    adapter: GroupedGemmAdapter,
    problem: GroupedGemmProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the destination, the launch."""
    launch, compute = adapter.launch, adapter.compute
    out_dtype, masked = getattr(torch, problem.out_dtype), problem.masked
    lengths_at, lengths_name = (3, "group_sizes") if masked else (2, "offsets")
    # What may have one element, which is contiguous whatever it is a view of.
    one, one_row = problem.num_groups == 1, problem.num_groups == 1 and problem.n == 1
    kinds = {0: problem.k == 1, 1: one_row and problem.k == 1, 4: problem.a_scale is not None}
    kinds |= {5: problem.b_scale is not None and (one or problem.b_scale == "tensor")}
    kinds |= {6: problem.a_global_scale, 7: problem.global_scale, 8: one_row and problem.bias}
    scalars = [at for at, may_be_one in kinds.items() if may_be_one]
    forms, reads = Forms(device), problem.device.type == "cpu" or checks_devices()
    calls, repeats = KnownCalls(adapter.launch), is_repeated(adapter) and not reads
    recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds

    def run(operands: Operands, given_dtype: torch.dtype | None, out: Tensor | None, checked: bool = False) -> Tensor:
        """`checked`: the call was checked, and this function made for it."""
        a, b = operands[:2]
        if a.get_device() != device:
            there: Tensor = elsewhere(a.get_device())(operands, given_dtype, out)
            return there
        key: Any = None
        if not a.is_nested and (given_dtype is None or type(given_dtype) is torch.dtype):
            key = a.shape, given_dtype, out is None
        made = out
        if out is None and repeats and key in calls and a.numel():
            made = a.new_empty(*a.shape[:-1], problem.n, dtype=out_dtype)
        given = (*operands, made)
        state = recognise(key, given)
        if state == 2 and made is not None:
            tick()
            return made
        if state:
            if reads:
                check_lengths(lengths_name, operands[lengths_at], b.shape[0], a, masked)
        else:
            form = None
            if given_dtype is None or type(given_dtype) is torch.dtype:
                form = forms.of((*operands, out), given_dtype)
            if form is None or form not in forms or transformed():
                if not checked:
                    check(operands, given_dtype, out)
                    check_form(operands, out, problem)
                forms.add(form)
            else:
                check_loose(NAME, _READ, operands)
                for scale in scalars:
                    if operands[scale].is_neg():  # type: ignore[union-attr]
                        check(operands, given_dtype, out)
                if out is not None:
                    check_own_memory(NAME, "out", out, _READ, operands)
                if reads:
                    check_lengths(lengths_name, operands[lengths_at], b.shape[0], a, masked)
            if made is None and repeats and a.numel():
                made = a.new_empty(*a.shape[:-1], problem.n, dtype=out_dtype)
                given = (*operands, made)
            calls.learn(key, given, 1)
        if not a.numel():
            return a.new_empty(*a.shape[:-1], b.shape[1], dtype=out_dtype) if out is None else out
        tick()
        operands = _dense(operands)
        if made is None:
            try:
                return compute(GroupedOperands(*operands))
            except Exception as error:
                failed(compute, error)
                raise
        launched = GroupedOperands(*operands), made
        try:
            launch(*launched)
        except Exception as error:
            failed(launch, error)
            raise
        if state and repeats:
            calls.attach(key, given, adapter.repeated, *launched)
        return made

    return run


def _dense(operands: Operands) -> Operands:
    """Vectors of one number a group as kernels read them, one after the other; the others have strides."""
    if all(operands[at] is None or operands[at].is_contiguous() for at in _VECTORS):  # type: ignore[union-attr]
        return operands
    made = list(operands)
    for at in _VECTORS:
        vector = operands[at]
        made[at] = None if vector is None else vector.contiguous()
    return tuple(made)  # type: ignore[return-value]


_op: Op[GroupedGemmProblem] = Op(
    Contract.of(
        GROUPED_GEMM,
        problem_of=problem_of,
        adapter=GroupedGemmAdapter,
        bind=bind,
        reference=grouped_gemm_reference,
        example="kernelhub.ops.gemm.grouped.inputs:grouped_gemm_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class GroupedGemmPlan(CallPlan):
    """A kernel selected for weights like these: `run`, with the arguments of `grouped_gemm`, is a whole call."""

    __slots__ = ()
    call = "(a, b, offsets, group_sizes, a_scale, b_scale, a_global_scale, b_global_scale, bias), None, out"
    fixed: ClassVar[Fixed] = {"out_dtype": lambda problem: getattr(torch, problem.out_dtype)}


def _memory(a: Tensor, b: Tensor, out_dtype: torch.dtype | None, **others: Any) -> dict[str, Tensor]:
    return {"out": a.new_empty((*a.shape[:-1], b.shape[1]), dtype=out_dtype or default_out_dtype(a.dtype))}


@publish(_op, prepares(_op, GroupedGemmPlan), traced=Traced(_memory))
def grouped_gemm(
    a: Tensor,
    b: Tensor,
    *,
    offsets: Tensor | None = None,
    group_sizes: Tensor | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    a_global_scale: Tensor | None = None,
    b_global_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Multiply groups of rows, each by the weights of its group: ``out[rows of g] = a[rows of g] @ b[g].T``.

    Args:
        a: rows; float32, float16, bfloat16, float8_e4m3fn, or fp4: uint8 or float4_e2m1fn_x2, ``K / 2`` columns, the
            first of two in the low four bits. ``[M, K]``, sorted by group, with `offsets`; or ``[G, M_max, K]``, padded
            per group, with `group_sizes`.
        b: weights as in checkpoints, ``[G, N, K]``, in the dtype of a; or fp4 ``[G, N, K / 2]`` for rows in float16,
            bfloat16 or MXFP8.
        offsets: int32 ``[G]`` on the device of a: the end of each group in a, not decreasing. A group may be empty.
            Rows past the last end belong to no group.
        group_sizes: int32 ``[G]`` on the device of a: the number of rows of each group, at most M_max. They are the
            first of its M_max rows.
        a_scale: factor of float8 rows. float32 ``[]``, ``[1]`` or ``[1, 1]``; one per row, float32 ``[M]`` or
            ``[M, 1]``; or, with b_scale per block, one per row and 128 columns, ``[M, ceil(K / 128)]`` in float32 or
            UE8M0 (float8_e8m0fnu, uint8). For padded rows ``[G, M_max]`` and ``[G, M_max, ceil(K / 128)]``. For MXFP8
            rows UE8M0 ``[M, ceil(K / 32)]``. For fp4 rows, which have the format of the weights, ``[M, ceil(K / 16)]``
            or ``[M, ceil(K / 32)]`` in the dtype of b_scale. Any strides: for transposed (MN-major) scales
            ``[ceil(K / 128), M]`` give the view ``a_scale.mT``.
        b_scale: factor of float8 weights: float32 ``[]``, ``[G]``, ``[G, 1]`` or ``[G, 1, 1]``; one per channel,
            float32 ``[G, N]`` or ``[G, N, 1]``; or one per block of 128 x 128, ``[G, ceil(N / 128), ceil(K / 128)]`` in
            float32 or UE8M0, for transposed scales the view ``b_scale.mT``; MXFP8, UE8M0 ``[G, N, ceil(K / 32)]``.
            Factor of fp4 weights: NVFP4, float8_e4m3fn ``[G, N, ceil(K / 16)]``; MXFP4, UE8M0 ``[G, N, ceil(K / 32)]``.
            Not swizzled.
        a_global_scale: float32 ``[]`` or ``[G]``, a second factor of NVFP4 rows.
        b_global_scale: float32 ``[]`` or ``[G]``, a second factor of NVFP4 weights.
        bias: ``[G, N]`` in float32, float16 or bfloat16.
        out_dtype: float32, float16 or bfloat16. By default the dtype of out, else of a; bfloat16 for float8 and fp4.
        out: destination ``[M, N]`` or ``[G, M_max, N]``. Rows of no group are not written. It must not overlap the
            operands.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        ``[M, N]`` or ``[G, M_max, N]``, products summed in float32. Without `out`, rows that belong to no group are
        undefined and may be NaN.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter. Offsets and sizes on a GPU
            are not checked: an end past the last row counts as the number of rows.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        ``torch.nn.functional.grouped_mm`` (contiguous); DeepGEMM's ``m_grouped_*_contiguous`` and ``_masked``. The
        example converts DeepGEMM's ``m_indices``, the group of each row with -1 for rows to skip, to offsets. Skipped
        rows then belong to the group before them.

    Example:
        >>> import torch, kernelhub
        >>> m_indices = torch.tensor([0, 0, -1, 2, 2, 2], dtype=torch.int32)
        >>> groups = torch.arange(3, dtype=torch.int32)
        >>> offsets = torch.searchsorted(m_indices.cummax(0).values, groups, right=True, out_int32=True)
        >>> offsets.tolist()
        [3, 3, 6]
        >>> a, b = torch.randn(6, 64), torch.randn(3, 32, 64)
        >>> out = kernelhub.grouped_gemm(a, b, offsets=offsets)
        >>> torch.allclose(out[3:], a[3:] @ b[2].T, atol=1e-4)
        True
    """
    if type(a) is not Tensor and isinstance(a, Tensor) and not isinstance(backend, DryRun):
        traced: Tensor = _op.traced(**locals())
        return traced
    if _op.again is not None:
        again: Tensor | None = _op.again(
            a, b, offsets, group_sizes, a_scale, b_scale, a_global_scale, b_global_scale, bias, out_dtype, out, backend
        )
        if again is not None:
            return again
    operands = (a, b, offsets, group_sizes, a_scale, b_scale, a_global_scale, b_global_scale, bias)
    try:
        b_kind = None if b_scale is None else geometry_of_b(b_scale, b)
        key = (
            a.dtype,
            b.dtype,
            *b.shape,
            a.shape[-2] > MOST_FEW * (1 if offsets is None else b.shape[0]),
            offsets is None,
            None if a_scale is None else geometry_of_a(a_scale, b_kind, a),
            b_kind,
            a_global_scale is not None,
            b_global_scale is not None,
            bias is not None,
            out_dtype or (default_out_dtype(a.dtype) if out is None else out.dtype),
        )
        if b.ndim != 3:
            raise ValueError
        run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        check(operands, out_dtype, out)
        raise
    if run is None:
        check(operands, out_dtype, out)
        fresh: Tensor = _op.decide(key, a.get_device(), backend)(operands, out_dtype, out, True)
        return fresh
    result: Tensor = run(operands, out_dtype, out)
    return result
