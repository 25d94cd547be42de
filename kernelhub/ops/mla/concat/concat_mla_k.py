"""`concat_mla_k`: the two parts of latent attention's keys side by side, for every head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Ask, Backend, Op
from kernelhub.dispatch.publish import publish
from kernelhub.ops.call_plan import CallPlan, prepares
from kernelhub.ops.mla.concat.adapter import ConcatAdapter
from kernelhub.ops.mla.concat.call import bind, check, problem_of
from kernelhub.ops.mla.concat.problem import CONCAT_MLA_K, ConcatProblem
from kernelhub.ops.mla.concat.reference import concat_mla_k_reference
from kernelhub.ops.operators import Traced

_op: Op[ConcatProblem] = Op(
    Contract.of(
        CONCAT_MLA_K,
        problem_of=problem_of,
        adapter=ConcatAdapter,
        bind=bind,
        reference=concat_mla_k_reference,
        example="kernelhub.ops.mla.concat.inputs:concat_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class ConcatPlan(CallPlan):
    """A kernel chosen for keys like these: ``run(k_nope, k_rope, out=None)`` is a whole call."""

    __slots__ = ()
    call = "k_nope, k_rope, out"


def _memory(k_nope: Tensor, k_rope: Tensor, **others: Any) -> dict[str, Tensor]:
    return {"out": k_nope.new_empty((*k_nope.shape[:2], k_nope.shape[2] + k_rope.shape[-1]))}


@publish(_op, prepares(_op, ConcatPlan), traced=Traced(_memory))
def concat_mla_k(k_nope: Tensor, k_rope: Tensor, out: Tensor | None = None, backend: Backend = None) -> Tensor:
    """Put each head's own part of the keys and the rotary part that all heads share side by side.

    Args:
        k_nope: ``[T, H, N]``, float32, float16, bfloat16 or float8_e4m3fn; usually a view of what the up-projection of
            the latent gives.
        k_rope: ``[T, R]`` or ``[T, 1, R]`` in the same dtype.
        out: destination ``[T, H, N + R]``. Where k_nope is its view ``out[..., :N]``, only the rotary part is written;
            it must not overlap the operands otherwise.
        backend: this backend or kernel, or the first of these that can, or an error with all reasons.

    Returns:
        ``[T, H, N + R]``, bit for bit what it is made of: the keys for `attention` with v of another width.

    Raises:
        InvalidArgument: an argument breaks this contract; the parameter is named.
        NoKernel: no kernel can run this, with the reason of each.

    Source:
        DeepSeek-V2 (2024), section 2.1; FlashInfer's function of the same name.

    Example:
        >>> import torch, kernelhub
        >>> kernelhub.concat_mla_k(torch.randn(10, 16, 128), torch.randn(10, 64)).shape
        torch.Size([10, 16, 192])
    """
    if type(k_nope) is not Tensor and isinstance(k_nope, Tensor) and not isinstance(backend, Ask):
        traced: Tensor = _op.traced(**locals())
        return traced
    try:
        _, heads, width = k_nope.shape
        key = (k_nope.dtype, heads, width, k_rope.shape[-1])
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        check(k_nope, k_rope, out)
        raise
    run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None:
        check(k_nope, k_rope, out)
        run = _op.decide(key, k_nope.get_device(), backend)
    result: Tensor = run(k_nope, k_rope, out)
    return result
