"""`fp8_gemm`: a product of float8 matrices, scaled by tensor, row or block."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Ask, Backend, Op
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.dispatch.publish import publish
from kernelhub.ops.arguments import check_is_tensor
from kernelhub.ops.call_plan import CallPlan, Fixed
from kernelhub.ops.gemm.fp8 import library
from kernelhub.ops.gemm.fp8.adapter import Fp8GemmAdapter
from kernelhub.ops.gemm.fp8.call import bind, problem_of, with_layout
from kernelhub.ops.gemm.fp8.checks import NAME, check, facts_of_weight, refuse
from kernelhub.ops.gemm.fp8.problem import FP8_GEMM, MOST_FEW, Fp8GemmProblem
from kernelhub.ops.gemm.fp8.reference import fp8_gemm_reference
from kernelhub.ops.gemm.fp8.scaling import of_rows
from kernelhub.ops.packed import PackedWeight, PackingPlan, prepared

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
    """A kernel chosen for weights like these: ``run(a, b, a_scale, b_scale, bias=None, out=None)`` is a whole call.

    Beside activations that are not quantised `pack` gives the weight as the kernel wants it.
    """

    __slots__ = ()
    call = "a, b, a_scale, b_scale, bias, out"
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
    asked = _op.ask(backend, args, kwargs)

    def make(bound: Bound) -> Fp8GemmPlan:
        plan = Fp8GemmPlan(_op, bound, asked.arguments)
        if packing and isinstance(weight := asked.arguments[1], Tensor):
            plan.check_packs(weight, asked.arguments[3])
        return plan

    return prepared(_op, asked, backend, with_layout, packing, make)


@publish(_op, _prepare, traced=library.fp8_gemm)
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

    How they are scaled is told from the scales: per tensor; per row of a (token), of b (channel) or of both; in blocks
    of 1 x 128 of a by 128 x 128 or 1 x 128 of b; in blocks of 1 x 32 of both (MXFP8). Activations that are not
    quantised have no scales, and weights then one, one per row, or one per 128 x 128 or 1 x 128. The last blocks may be
    cut short by M, N, K.

    Args:
        a: activations ``[M, K]``, float8_e4m3fn or float8_e5m2; or bfloat16 or float16, where the weights alone are
            quantised.
        b: weights ``[N, K]``, float8_e4m3fn, as in checkpoints; or, beside bfloat16 and float16, the weight as a plan's
            `pack` gave it, with its scale.
        a_scale: float32 ``[]``, ``[1]`` or ``[1, 1]`` for all; float32 ``[M]`` or ``[M, 1]`` per token; float32 or
            float8_e8m0fnu ``[M, ceil(K/128)]``, or ``[ceil(M/128), ceil(K/128)]``, which is copied for each token;
            float8_e8m0fnu ``[M, ceil(K/32)]``. Any strides: of scales that lie transposed (MN-major), as
            ``[ceil(K/128), M]``, give the view ``a_scale.t()``. None beside bfloat16 and float16.
        b_scale: in the same order float32 ``[]``, ``[1]`` or ``[1, 1]``; float32 ``[N]``, ``[N, 1]`` or ``[1, N]`` per
            channel; float32 or float8_e8m0fnu ``[ceil(N/128), ceil(K/128)]`` or ``[N, ceil(K/128)]``, of transposed
            ones the view ``b_scale.t()``; float8_e8m0fnu ``[N, ceil(K/32)]``. For float8_e8m0fnu, bytes as uint8 are
            accepted.
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
            a.shape[0] > MOST_FEW,
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
