"""`linear_attention`: attention through a state that decays."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Ask, Backend, Op
from kernelhub.dispatch.publish import publish
from kernelhub.ops.call_plan import CallPlan, Fixed, prepares
from kernelhub.ops.linear_attention.adapter import LinearAdapter
from kernelhub.ops.linear_attention.call import NAME, bind, check, problem_of, q_len_of
from kernelhub.ops.linear_attention.problem import LINEAR_ATTENTION, LinearProblem
from kernelhub.ops.linear_attention.reference import linear_attention_reference
from kernelhub.ops.operands import check_flag
from kernelhub.ops.operators import Traced

_op: Op[LinearProblem] = Op(
    Contract.of(
        LINEAR_ATTENTION,
        problem_of=problem_of,
        adapter=LinearAdapter,
        bind=bind,
        reference=linear_attention_reference,
        example="kernelhub.ops.linear_attention.inputs:linear_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class LinearPlan(CallPlan):
    """A kernel chosen for calls like this: ``run`` takes the op's arguments but ``return_state`` and ``backend``."""

    __slots__ = ()
    call = "q, k, v, decay, state, cu_seqlens, scale, state_indices, out, out_state"
    fixed: ClassVar[Fixed] = {"return_state": lambda problem: problem.out_state}


def _memory(q: Tensor, v: Tensor, decay: Tensor, cu_seqlens: Tensor | None, **others: Any) -> dict[str, Tensor]:
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = decay.new_empty((sequences, q.shape[-2], q.shape[-1], v.shape[-1]))
    return {"out": v.new_empty(v.shape), "out_state": states}


@publish(_op, prepares(_op, LinearPlan), traced=Traced(_memory, ("out", "out_state"), {"out_state": "return_state"}))
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    state_indices: Tensor | None = None,
    out: Tensor | None = None,
    out_state: Tensor | None = None,
    return_state: bool = False,
    backend: Backend = None,
) -> Any:
    """Attend through a state that decays: ``S_t = exp(-decay) S_(t-1) + k_t^T v_t`` and ``out_t = scale q_t S_t``.

    A token sees itself undecayed. Going on from a returned state is the same as one long call.

    Args:
        q: ``[B, S, H, D]``, or ragged ``[T, H, D]`` with `cu_seqlens`; float32, float16 or bfloat16.
        k: of the shape and dtype of q.
        v: ``[B, S, H, Dv]``, or ``[T, H, Dv]``, in the same dtype.
        decay: float32 ``[H]``, from 0 up: by how much the log of a state falls with each token (the slopes of
            lightning attention).
        state: float32 ``[N, H, D, Dv]``, what each of the N sequences goes on from; None for zero. With
            `state_indices` ``[slots, H, D, Dv]``, a pool of states.
        cu_seqlens: int32 ``[N + 1]``, where each sequence of a ragged batch starts, and the last one ends. Rows after
            the last are not written.
        scale: factor of the result.
        state_indices: int32 ``[N]``, the slot of each sequence in `state` and `out_state`, no two alike. A sequence
            at a negative one starts from zero, and its state is not kept.
        out: destination of the result, in the shape and dtype of v; it must overlap no operand.
        out_state: destination of the states after the last tokens, as `state`; it may be `state` itself, to go on in
            place. Other slots stay as they are. Given, it is returned.
        return_state: also return the states; without `out_state` new ones, ``[N, H, D, Dv]`` whatever the indices.
        backend: this backend or kernel, or the first of these that can, or an error with all reasons.

    Decays, offsets and slots of tensors on a GPU are checked with ``KERNELHUB_CHECK=1`` only.

    Returns:
        The result in the shape and dtype of v; with `return_state` or `out_state` also the states, float32.

    Raises:
        InvalidArgument: an argument breaks this contract; the parameter is named.
        NoKernel: no kernel can run this, with the reason of each.

    Source:
        Lightning Attention-2 (Qin et al. 2024); the convention is that of MiniMax-Text-01, of vLLM's lightning
        attention, and of `fused_recurrent_simple_gla` of flash-linear-attention with a gate of -decay, which scales by
        D^-0.5 by default.

    Example:
        >>> import torch, kernelhub
        >>> q, k, v = torch.randn(3, 1, 50, 8, 64)
        >>> decay = torch.linspace(0.01, 0.5, 8)
        >>> whole = kernelhub.linear_attention(q, k, v, decay)
        >>> _, state = kernelhub.linear_attention(q[:, :30], k[:, :30], v[:, :30], decay, return_state=True)
        >>> rest = kernelhub.linear_attention(q[:, 30:], k[:, 30:], v[:, 30:], decay, state)
        >>> torch.allclose(rest, whole[:, 30:], atol=1e-3)
        True
    """
    if type(q) is not Tensor and isinstance(q, Tensor) and not isinstance(backend, Ask):
        return _op.traced(**locals())
    try:
        shape = q.shape
        key = (
            q.dtype,
            shape[-2],
            shape[-1],
            v.shape[-1],
            q_len_of(shape),
            state is not None,
            return_state or out_state is not None,
            state_indices is not None,
        )
        if type(return_state) is not bool:  # 1 would be taken for the key's True
            check_flag(NAME, "return_state", return_state)
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        check(q, k, v, decay, state, cu_seqlens, scale, state_indices, out, out_state, return_state)
        raise
    run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None:
        check(q, k, v, decay, state, cu_seqlens, scale, state_indices, out, out_state, return_state)
        run = _op.decide(key, q.get_device(), backend)
    return run(q, k, v, decay, state, cu_seqlens, scale, state_indices, out, out_state)
