"""`fp8_gemm`: a product of float8 matrices, scaled by tensor, row or block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Ask, Backend, Op
from kernelhub.dispatch.plan import Plan, traced_as
from kernelhub.dispatch.publish import publish
from kernelhub.ops.gemm.fp8 import library
from kernelhub.ops.gemm.fp8.adapter import Fp8GemmAdapter
from kernelhub.ops.gemm.fp8.call import NAME, bind, check, problem_of
from kernelhub.ops.gemm.fp8.problem import MOST_FEW, REGIMES, Fp8GemmProblem, complete, contradiction, regime
from kernelhub.ops.gemm.fp8.reference import fp8_gemm_reference

_op: Op[Fp8GemmProblem] = Op(
    Contract(
        name=NAME,
        summary="a product of float8 matrices, scaled by tensor, row or block",
        problem=Fp8GemmProblem,
        problem_of=problem_of,
        adapter=Fp8GemmAdapter,
        bind=bind,
        reference=fp8_gemm_reference,
        example="kernelhub.ops.gemm.fp8.inputs:fp8_gemm_inputs",
        complete=complete,
        contradiction=contradiction,
        regimes=REGIMES,
        regime=regime,
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class Fp8GemmPlan(Plan):
    """A kernel chosen for weights like these: ``run(a, b, a_scale, b_scale, bias=None, out=None)`` is a whole call."""

    def __init__(self, bound: Bound) -> None:
        direct, kernel = bound.run, bound.selection.selected
        dtype = getattr(torch, bound.selection.problem.out_dtype)

        def run(
            a: Tensor,
            b: Tensor,
            a_scale: Tensor,
            b_scale: Tensor,
            bias: Tensor | None = None,
            out: Tensor | None = None,
        ) -> Tensor:
            result: Tensor = direct(a, b, a_scale, b_scale, bias, out)
            return result

        def traced(
            a: Tensor,
            b: Tensor,
            a_scale: Tensor,
            b_scale: Tensor,
            bias: Tensor | None = None,
            out: Tensor | None = None,
        ) -> Tensor:
            return fp8_gemm(a, b, a_scale, b_scale, bias, dtype, out, kernel)

        super().__init__(bound, traced_as(run, traced))


def _prepare(*args: Any, backend: Backend = None, **kwargs: Any) -> Fp8GemmPlan:
    """Choose once for operands like these: arguments as of `fp8_gemm`."""
    asked = _op.ask(backend, args, kwargs)
    return Fp8GemmPlan(_op.bound_for(asked.key, asked.device, backend))


@publish(_op, _prepare, traced=library.fp8_gemm)
def fp8_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Multiply float8 activations by float8 weights, both scaled: ``(a * a_scale) @ (b * b_scale).T + bias``.

    How they are scaled is told from the scales: per tensor; per row of a (token), of b (channel) or of both; in blocks
    of 1 x 128 of a by 128 x 128 of b; in blocks of 1 x 32 of both (MXFP8). The last blocks may be cut short by M, N, K.

    Args:
        a: activations ``[M, K]``, float8_e4m3fn.
        b: weights ``[N, K]``, float8_e4m3fn, as in checkpoints.
        a_scale: float32 ``[]`` or ``[1]`` for all; float32 ``[M]`` or ``[M, 1]`` per token; float32 or float8_e8m0fnu
            ``[M, ceil(K/128)]``; float8_e8m0fnu ``[M, ceil(K/32)]``. Rows or columns may be contiguous.
        b_scale: in the same order float32 ``[]`` or ``[1]``; float32 ``[N]`` or ``[N, 1]`` per channel; float32 or
            float8_e8m0fnu ``[ceil(N/128), ceil(K/128)]``; float8_e8m0fnu ``[N, ceil(K/32)]``. For float8_e8m0fnu, bytes
            as uint8 are accepted.
        bias: ``[N]`` in `out_dtype`.
        out_dtype: bfloat16, float16 or float32.
        out: destination ``[M, N]`` in `out_dtype`, which overlaps no operand.
        backend: this backend or kernel, or the first of these that can, or an error with all reasons.

    Returns:
        ``[M, N]`` in `out_dtype`.

    Raises:
        InvalidArgument: an argument breaks this contract; the parameter is named.
        NoKernel: no kernel can run this, with the reason of each.

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
    if type(a) is not Tensor and isinstance(a, Tensor) and not isinstance(backend, Ask):
        return library.fp8_gemm(a, b, a_scale, b_scale, bias, out_dtype, out, backend)
    try:
        rows, columns = b.shape
        rank = a_scale.ndim
        last = 1 if rank == 0 else a_scale.shape[1] if rank == 2 else int(a_scale.shape[0] == 1)
        key = (
            a.dtype,
            rows,
            columns,
            (a_scale.dtype, rank, last),
            (b_scale.dtype, b_scale.shape),
            out_dtype,
            bias is not None,
            a.shape[0] > MOST_FEW,
        )
    except (AttributeError, TypeError, ValueError, IndexError):
        check(a, b, a_scale, b_scale, bias, out_dtype, out)
        raise
    if backend is None and not (_contexts_used and _contexts()):
        run: Callable[..., Any] | None = _get(key)
    else:
        run = _op.override(key, backend)
    if run is None:
        check(a, b, a_scale, b_scale, bias, out_dtype, out)
        fresh: Tensor = _op.decide(key, a.get_device(), backend)(a, b, a_scale, b_scale, bias, out, True)
        return fresh
    result: Tensor = run(a, b, a_scale, b_scale, bias, out)
    return result
