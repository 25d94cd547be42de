"""`bmm_fp8`: a product of float8 matrices for each of a batch."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Ask, Backend, Op
from kernelhub.dispatch.publish import publish
from kernelhub.ops.call_plan import CallPlan, Fixed, prepares
from kernelhub.ops.gemm.fp8.batched.adapter import BmmFp8Adapter
from kernelhub.ops.gemm.fp8.batched.call import bind, check, problem_of
from kernelhub.ops.gemm.fp8.batched.problem import BMM_FP8, BmmFp8Problem
from kernelhub.ops.gemm.fp8.batched.reference import bmm_fp8_reference
from kernelhub.ops.operators import Traced

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
    """A kernel chosen for operands like these: ``run(a, b, a_scale, b_scale, out=None)`` is a whole call."""

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
    """Multiply float8 matrices of a batch, scaled as a whole or each: ``(a[i] * a_scale) @ (b[i] * b_scale).T``.

    Args:
        a: ``[B, M, K]``, float8_e4m3fn, or float8_e5m2 where b is not; for latent attention heads first, a view of
            ``[M, B, K]``.
        b: ``[B, N, K]``, float8_e4m3fn, or float8_e5m2 where a is not: weights as in checkpoints. FlashInfer's function
            takes ``[B, K, N]`` in column-major order, which is the same memory: give ``its_b.transpose(1, 2)``.
        a_scale: float32 ``[]`` or ``[1]`` for all, or ``[B]`` for each; more dimensions of one may follow, as in
            ``[1, 1]`` and ``[B, 1, 1]``.
        b_scale: the same of b.
        out_dtype: bfloat16, float16 or float32.
        out: destination ``[B, M, N]`` in `out_dtype`, of any strides, which overlaps no operand.
        backend: this backend or kernel, or the first of these that can, or an error with all reasons.

    Returns:
        ``[B, M, N]`` in `out_dtype`.

    Raises:
        InvalidArgument: an argument breaks this contract; the parameter is named.
        NoKernel: no kernel can run this, with the reason of each.

    Source:
        The absorbed projections of latent attention (DeepSeek-V2, section 2.1); FlashInfer's function of the same name.

    Example:
        >>> import torch, kernelhub
        >>> from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
        >>> call = bmm_fp8_inputs(batch=4, tokens=3)
        >>> kernelhub.bmm_fp8(**call).shape
        torch.Size([4, 3, 512])
    """
    if type(a) is not Tensor and isinstance(a, Tensor) and not isinstance(backend, Ask):
        traced: Tensor = _op.traced(**locals())
        return traced
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
