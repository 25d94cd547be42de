"""`merge_attention_states`: attention over parts of the keys into attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Ask, Backend, Op
from kernelhub.dispatch.publish import publish
from kernelhub.ops.call_plan import CallPlan, Fixed, prepares
from kernelhub.ops.formats import E4M3
from kernelhub.ops.merge.adapter import MergeAdapter
from kernelhub.ops.merge.call import NAME, bind, check, problem_of
from kernelhub.ops.merge.problem import MERGE_ATTENTION_STATES, MergeProblem
from kernelhub.ops.merge.reference import merge_attention_states_reference
from kernelhub.ops.operands import check_flag
from kernelhub.ops.operators import Traced

_op: Op[MergeProblem] = Op(
    Contract.of(
        MERGE_ATTENTION_STATES,
        problem_of=problem_of,
        adapter=MergeAdapter,
        bind=bind,
        reference=merge_attention_states_reference,
        example="kernelhub.ops.merge.inputs:merge_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class MergePlan(CallPlan):
    """A kernel chosen for states like these: ``run(outs, lses, out=None, out_lse=None)`` is a whole call.

    `out_scale` is the one that the plan was prepared with; a tensor is read at each run.
    """

    __slots__ = ()
    call = "outs, lses, out, out_lse, out_scale"
    fixed: ClassVar[Fixed] = {"return_lse": lambda problem: problem.lse}
    kept = ("out_scale",)


def _memory(outs: Any, lses: Any, out_scale: float | Tensor | None, **others: Any) -> dict[str, Tensor]:
    dtype = outs[0].dtype if out_scale is None else E4M3
    return {"out": outs[0].new_empty(outs[0].shape, dtype=dtype), "out_lse": lses[0].new_empty(lses[0].shape)}


@publish(_op, prepares(_op, MergePlan), traced=Traced(_memory, ("out", "out_lse"), {"out_lse": "return_lse"}))
def merge_attention_states(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    out: Tensor | None = None,
    out_lse: Tensor | None = None,
    return_lse: bool = False,
    out_scale: float | Tensor | None = None,
    backend: Backend = None,
) -> Any:
    """Merge attention over disjoint parts of the keys into attention over all of them.

    Args:
        outs: results over each part, two or more in a list or stacked: ``[T, H, D]``, or ``[B, S, H, D]``, in
            float32, float16 or bfloat16.
        lses: natural logs of their softmax denominators, float32 ``[H, T]``, or ``[B, H, S]``: as `attention` and
            `paged_attention` return them. -inf or +inf says that a part has no key for that query; its result
            is then not read.
        out: destination; without `out_scale` it may be one of `outs`, to merge in place. It overlaps none otherwise.
        out_lse: destination of the merged LSE; it may be one of `lses`, and must overlap none otherwise. Given, the
            LSE is returned.
        return_lse: also return the merged LSE.
        out_scale: give the merged result divided by this as float8_e4m3fn, saturating at 448: a float other than 0, or
            float32 of one element.
        backend: this backend or kernel, or the first of these that can, or an error with all reasons.

    Returns:
        The merged result in the shape and dtype of each, or in float8_e4m3fn with `out_scale`; with `return_lse` also
        the LSE. A query without a key in any part gives zeros and -inf.

    Raises:
        InvalidArgument: an argument breaks this contract; the parameter is named.
        NoKernel: no kernel can run this, with the reason of each.

    Source:
        Section 3.1 of FlashAttention-2 (Dao 2023), where blocks of keys are merged in the same way.

    Example:
        >>> import torch, kernelhub
        >>> q, k, v = torch.randn(1, 4, 8, 64), *torch.randn(2, 1, 32, 8, 64)
        >>> states = [kernelhub.attention(q, k[:, i], v[:, i], return_lse=True) for i in (slice(20), slice(20, 32))]
        >>> out = kernelhub.merge_attention_states(*zip(*states))
        >>> torch.allclose(out, kernelhub.attention(q, k, v), atol=1e-5)
        True
    """
    try:
        if type(outs[0]) is not Tensor and isinstance(outs[0], Tensor) and not isinstance(backend, Ask):
            return _op.traced(**locals())
        first = outs[0]
        shape = first.shape
        key = (
            first.dtype,
            shape[-2],
            shape[-1],
            2 if len(outs) == 2 else 3,
            len(shape),
            return_lse is True or out_lse is not None,
            None if out_scale is None else "tensor" if isinstance(out_scale, Tensor) else "value",
        )
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        check(outs, lses, return_lse, out_scale)
        raise
    run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if return_lse is not True and return_lse is not False:
        check_flag(NAME, "return_lse", return_lse)
    if run is None:
        check(outs, lses, return_lse, out_scale)
        run = _op.decide(key, first.get_device(), backend)
    return run(outs, lses, out, out_lse, out_scale)
