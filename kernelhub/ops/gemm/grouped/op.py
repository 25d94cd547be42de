"""`grouped_gemm`: groups of rows, each times the weights of its group."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Ask, Backend, Op
from kernelhub.dispatch.publish import publish
from kernelhub.ops.call_plan import CallPlan, Fixed, prepares
from kernelhub.ops.gemm.grouped.adapter import GroupedGemmAdapter
from kernelhub.ops.gemm.grouped.call import bind, check, default_out_dtype, problem_of
from kernelhub.ops.gemm.grouped.problem import (
    GROUPED_GEMM,
    MOST_FEW,
    GroupedGemmProblem,
)
from kernelhub.ops.gemm.grouped.reference import grouped_gemm_reference
from kernelhub.ops.gemm.grouped.scales import geometry_of_a, geometry_of_b
from kernelhub.ops.operators import Traced

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
    """A kernel chosen for weights like these: `run`, with the arguments of `grouped_gemm`, is a whole call."""

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
            first of two in the low four bits. ``[M, K]``, sorted by group, with `offsets`; or ``[G, M_max, K]``, where
            each group has a place of its own, with `group_sizes`.
        b: weights as checkpoints hold them, ``[G, N, K]``: in the dtype of a; or beside float16, bfloat16 or MXFP8 rows
            in fp4, ``[G, N, K / 2]``.
        offsets: int32 ``[G]`` on the device of a: where each group ends in a, not decreasing; a group may be empty.
            Rows past the last end belong to no group.
        group_sizes: int32 ``[G]`` on the device of a: how many of its M_max rows each group has, from the first on.
        a_scale: factor of float8 rows. float32 ``[]``, ``[1]`` or ``[1, 1]``; one per row, float32 ``[M]`` or
            ``[M, 1]``; or, with b_scale per block, one per row and 128 columns, ``[M, ceil(K / 128)]`` in float32 or
            UE8M0 (float8_e8m0fnu, uint8). For masked rows ``[G, M_max]`` and ``[G, M_max, ceil(K / 128)]``. Of MXFP8
            rows, UE8M0 ``[M, ceil(K / 32)]``; of fp4 rows, which are of the weights' format, ``[M, ceil(K / 16)]`` or
            ``[M, ceil(K / 32)]`` as of b_scale. Any strides: of scales that lie transposed (MN-major), as
            ``[ceil(K / 128), M]``, give the view ``a_scale.mT``.
        b_scale: factor of float8 weights: float32 ``[]``, ``[G]``, ``[G, 1]`` or ``[G, 1, 1]``; one per channel,
            float32 ``[G, N]`` or ``[G, N, 1]``; or one per block of 128 x 128, ``[G, ceil(N / 128), ceil(K / 128)]`` in
            float32 or UE8M0, of transposed ones the view ``b_scale.mT``; MXFP8, UE8M0 ``[G, N, ceil(K / 32)]``. Factor
            of fp4 weights: NVFP4, float8_e4m3fn ``[G, N, ceil(K / 16)]``; MXFP4, UE8M0 ``[G, N, ceil(K / 32)]``. Not
            swizzled.
        a_global_scale: float32 ``[]`` or ``[G]``, one more factor of NVFP4 rows.
        b_global_scale: float32 ``[]`` or ``[G]``, one more factor of NVFP4 weights.
        bias: ``[G, N]`` in float32, float16 or bfloat16.
        out_dtype: float32, float16 or bfloat16; by default that of out, else that of a, bfloat16 for float8 and fp4.
        out: destination ``[M, N]`` or ``[G, M_max, N]``; rows of no group keep what it holds. It overlaps no operand.
        backend: this backend or kernel, or the first of these that can, or an error with all reasons.

    Returns:
        ``[M, N]`` or ``[G, M_max, N]``, products summed in float32. Without `out`, rows that belong to no group hold
        anything, NaN too.

    Raises:
        InvalidArgument: an argument breaks this contract; the parameter is named. Lengths on a GPU are not read for it:
            there, an end beyond the rows is taken for their number.
        NoKernel: no kernel can run this, with the reason of each.

    Source:
        ``torch.nn.functional.grouped_mm`` (contiguous); DeepGEMM's ``m_grouped_*_contiguous`` and ``_masked``. Where it
        takes ``m_indices``, the group of each row, with -1 for rows to skip, offsets are as below; rows to skip then
        count to the group before them.

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
    if type(a) is not Tensor and isinstance(a, Tensor) and not isinstance(backend, Ask):
        traced: Tensor = _op.traced(**locals())
        return traced
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
