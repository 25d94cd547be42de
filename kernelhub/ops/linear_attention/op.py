"""`linear_attention`: attention through a state that decays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.forms import python_value
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import Forms, check_wants_no_gradient, dense, describe, dtype_name
from kernelhub.ops.attention.arguments import check_offsets
from kernelhub.ops.call_plan import CallPlan, Fixed, prepares
from kernelhub.ops.checked import Checked
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.linear_attention.adapter import LinearAdapter, States
from kernelhub.ops.linear_attention.problem import ANY, FLOATS, LINEAR_ATTENTION, MANY, ONE, LinearProblem
from kernelhub.ops.linear_attention.reference import linear_attention_reference
from kernelhub.ops.operands import (
    check_destination,
    check_flag,
    check_number,
    check_operand,
    check_untransformed,
    is_plain_view,
    may_overlap,
)
from kernelhub.ops.operators import Traced
from kernelhub.ops.values import checks_devices, values_to_check
from kernelhub.probes.device import facts_of

NAME = "linear_attention"
_DTYPES = tuple(getattr(torch, name) for name in FLOATS)
_checked = Checked()


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def problem_of(key: Any, device: int) -> LinearProblem:
    """The problem that a key means on a device; the key is built in `linear_attention`."""
    dtype, num_heads, head_dim, value_dim, q_len, has_state, keeps_state, has_indices = key
    return LinearProblem(
        device=facts_of(device),
        dtype=dtype_name(dtype),
        num_heads=num_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        q_len=q_len,
        ragged=q_len == ANY,
        state=has_state,
        out_state=keeps_state,
        state_indices=has_indices,
    )


def q_len_of(shape: Sequence[int]) -> str:
    """The bucket of a q of this shape."""
    return ANY if len(shape) == 3 else ONE if shape[1] == 1 else MANY


def check(
    q: Any,
    k: Any,
    v: Any,
    decay: Any,
    state: Any,
    cu_seqlens: Any,
    scale: Any,
    state_indices: Any,
    out: Any,
    out_state: Any,
    return_state: Any = True,
) -> None:
    """Everything that the contract says of a call."""
    check_operand(NAME, "q", q)
    dtype, shape = q.dtype, q.shape
    if dtype not in _DTYPES:
        refuse("q", f"has dtype {dtype_name(dtype)}", f"give {', '.join(FLOATS)}")
    if len(shape) not in (3, 4) or 0 in shape[-2:]:
        refuse("q", f"has shape {list(shape)}", "give [B, S, H, D], or [T, H, D] with cu_seqlens")
    check_operand(NAME, "v", v)
    value_shape = v.shape
    if value_shape[:-1] != shape[:-1] or value_shape[-1] == 0:
        refuse("v", f"has shape {list(value_shape)}", f"give {[*shape[:-1]]} and a width")
    heads, width, value_width = shape[-2], shape[-1], value_shape[-1]
    _operand("q", q, shape, dtype, q)
    _operand("k", k, shape, dtype, q)
    _operand("v", v, value_shape, dtype, q)
    _operand("decay", decay, (heads,), torch.float32, q)
    sequences = _check_offsets(q, cu_seqlens)
    check_number(NAME, "scale", scale, "give a finite float")
    check_flag(NAME, "return_state", return_state)
    one_state = (heads, width, value_width)
    if state_indices is not None:
        _operand("state_indices", state_indices, (sequences,), torch.int32, q)
        if state is None and out_state is None:
            refuse("state_indices", "is given without states", "give state, or out_state")
    for parameter, given in (("state", state), ("out_state", out_state)):
        if given is not None:
            _check_states(parameter, given, None if state_indices is not None else sequences, one_state, q)
    _check_destinations(q, k, v, decay, state, cu_seqlens, state_indices, out, out_state)
    check_values(q, decay, state, cu_seqlens, state_indices, out_state)


def _check_destinations(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_indices: Tensor | None,
    out: Any,
    out_state: Any,
) -> None:
    """They overlap no operand, except that out_state may be state itself, to update in place."""
    read: dict[str, Any] = {"q": q, "k": k, "v": v, "decay": decay}
    read |= {"cu_seqlens": cu_seqlens, "state_indices": state_indices}
    if out is not None:
        beside = read | {"state": state, "out_state": out_state}
        check_destination(NAME, "out", out, v.shape, q.dtype, q.device, beside)
    if out_state is not None:
        beside = read if is_same(out_state, state) else read | {"state": state}
        check_destination(NAME, "out_state", out_state, out_state.shape, torch.float32, q.device, beside)


def is_same(out_state: Tensor, state: Tensor | None) -> bool:
    """The states are written where they are read."""
    return state is out_state or (
        state is not None
        and state.data_ptr() == out_state.data_ptr()
        and state.shape == out_state.shape
        and state.stride() == out_state.stride()
    )


def check_values(
    q: Tensor,
    decay: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_indices: Tensor | None,
    out_state: Tensor | None,
) -> None:
    """Decays, offsets and slots; on a GPU they are looked at with KERNELHUB_CHECK=1 only."""
    decays = values_to_check(decay)
    if decays is None:
        return
    rates: list[float] = decays.tolist()
    if not (min(rates) >= 0 and sum(rates) < math.inf):  # the sum is NaN if one is
        head, rate = next((head, rate) for head, rate in enumerate(rates) if not 0 <= rate < math.inf)
        refuse("decay", f"is {rate} for head {head}", "give finite numbers from 0 up")
    offsets = None if cu_seqlens is None else values_to_check(cu_seqlens)
    if offsets is not None:
        check_offsets(NAME, "cu_seqlens", offsets.tolist(), len(offsets) - 1, q.shape[0], None)
    slots = None if state_indices is None else values_to_check(state_indices)
    if slots is not None:
        _check_slots(slots.tolist(), (("state", state), ("out_state", out_state)))


def _check_slots(slots: Sequence[int], pools: Sequence[tuple[str, Tensor | None]]) -> None:
    """Each is in every pool, and all are distinct; negative ones mean no slot."""
    used = [slot for slot in slots if slot >= 0]
    for parameter, pool in pools:
        if pool is not None and used and max(used) >= pool.shape[0]:
            sequence = slots.index(max(used))
            refuse("state_indices", f"is {max(used)} for sequence {sequence}", f"{parameter} has {pool.shape[0]} slots")
    if len(set(used)) < len(used):
        slot = next(slot for slot in used if used.count(slot) > 1)
        first, second = [sequence for sequence, other in enumerate(slots) if other == slot][:2]
        refuse("state_indices", f"is {slot} for sequences {first} and {second}", "give each sequence a slot of its own")


def _check_offsets(q: Tensor, cu_seqlens: Any) -> int:
    """How many sequences there are."""
    if q.ndim == 4:
        if cu_seqlens is not None:
            refuse("cu_seqlens", f"is given with a q of shape {list(q.shape)}", "give [T, H, D]")
        return q.shape[0]
    check_operand(NAME, "cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        refuse("cu_seqlens", f"has shape {list(cu_seqlens.shape)}", "give [sequences + 1]")
    _operand("cu_seqlens", cu_seqlens, cu_seqlens.shape, torch.int32, q)
    return len(cu_seqlens) - 1


def _check_states(parameter: str, given: Any, count: int | None, one: tuple[int, ...], q: Tensor) -> None:
    """A state for each of `count` sequences, or for any number of them in a pool."""
    check_operand(NAME, parameter, given)
    shape = given.shape
    if len(shape) != 4 or shape[1:] != one or (count is not None and shape[0] != count):
        wanted = ", ".join(map(str, ("slots" if count is None else count, *one)))
        refuse(parameter, f"has shape {list(shape)}", f"give [{wanted}]")
    _operand(parameter, given, shape, torch.float32, q)


def _operand(parameter: str, given: Any, shape: Sequence[int], dtype: torch.dtype, q: Tensor) -> None:
    """A tensor of this shape and dtype, where q is."""
    check_operand(NAME, parameter, given)
    if given.dtype is not dtype:
        refuse(parameter, f"has dtype {dtype_name(given.dtype)}", f"give {dtype_name(dtype)}")
    if given.shape != torch.Size(shape):
        refuse(parameter, f"has shape {list(given.shape)}", f"give {list(shape)}")
    if given.device != q.device:
        refuse(parameter, f"is on {given.device}", f"move it to {q.device}, where q is")
    check_wants_no_gradient(NAME, parameter, given)


def bind(
    adapter: Any,
    problem: LinearProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the destinations, the launch."""
    launch = adapter.launch
    keeps = problem.out_state
    shape = (problem.num_heads, problem.head_dim, problem.value_dim)
    wanted = (getattr(torch, problem.dtype), *shape, problem.q_len, problem.state, problem.state_indices)
    dtype = wanted[0]
    forms = Forms(device)
    looks = problem.device.type == "cpu" or checks_devices()
    calls, repeats = KnownCalls(launch), is_repeated(adapter) and not looks
    recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds

    def memory_is_plain(
        reads: tuple[Tensor | None, ...], state: Tensor | None, out: Tensor | None, out_state: Tensor | None
    ) -> bool:
        """Checks that the form does not cover: values that are read, and destinations that must not overlap."""
        for tensor in (*reads, state):
            if tensor is not None and not (tensor.is_contiguous() or is_plain_view(tensor)):
                return False
        if out is not None and (not out.is_contiguous() or may_overlap(out, (*reads, state, out_state))):
            return False
        if out_state is None:
            return True
        apart = not may_overlap(out_state, (*reads, None if out_state is state else state))
        return apart and out_state.is_contiguous()

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        state: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float,
        state_indices: Tensor | None,
        out: Tensor | None,
        out_state: Tensor | None,
    ) -> Any:
        if q.get_device() != device:
            there = elsewhere(q.get_device())
            return there(q, k, v, decay, state, cu_seqlens, scale, state_indices, out, out_state)
        key: Any = None
        again, made, after = 0, out, out_state
        in_place = state is not None and out_state is state
        before = None if in_place else state  # a form has no tensor twice
        if type(scale) is float and scale and not q.is_nested:  # 0.0 and -0.0 would be one key
            key = q.shape, scale, out is None, out_state is None, in_place
            if key in calls and dense(q, dtype, device):
                if out is None:
                    made = q.new_empty(*key[0][:-1], shape[2])
                if out_state is None and keeps:
                    after = _new_states(q, cu_seqlens, shape)
                again = recognise(key, (q, k, v, decay, before, cu_seqlens, state_indices, made, after))
                if again == 2:
                    tick()
                    return (made, after) if keeps else made
        unread = again != 0  # values, which a form does not have
        if not again:
            try:
                form = forms.of((q, k, v, decay, state, cu_seqlens, state_indices, out, out_state))
                plain = form in forms and memory_is_plain(
                    (q, k, v, decay, cu_seqlens, state_indices), state, out, out_state
                )
            except (AttributeError, RuntimeError):  # what has no shape or no memory; `check` names it
                form, plain = None, False
            if not plain or type(scale) is not float or not math.isfinite(scale):
                operands = (q, k, v, decay, state, cu_seqlens, scale, state_indices, out, out_state)
                if not _checked.holds(operands):
                    check(*operands)
                check_form(q, v, state is not None, state_indices is not None)
                if out_state is not None and not keeps:
                    refuse("out_state", "is given to a plan without it", "prepare it with return_state=True")
                forms.add(form)
                scale = python_value(scale)
            else:
                check_untransformed(NAME, {"q": q, "k": k, "v": v, "decay": decay, "state": state})
                unread = True
            made = v.new_empty(*v.shape) if out is None else out
            if keeps and out_state is None:
                after = _new_states(q, cu_seqlens, shape)
            calls.learn(key, (q, k, v, decay, before, cu_seqlens, state_indices, made, after), 2)
        if looks and unread:
            check_values(q, decay, state, cu_seqlens, state_indices, out_state)
        assert made is not None
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if sequences and (made.numel() or keeps):
            after_at = None if out_state is None else state_indices
            launched = q, k, v, decay, scale, cu_seqlens, States(state, state_indices, after, after_at), made
            tick()
            try:
                launch(*launched)
            except Exception as error:
                failed(launch, error)
                check(q, k, v, decay, state, cu_seqlens, scale, state_indices, out, out_state)
                raise
            if again and repeats:
                given = (q, k, v, decay, before, cu_seqlens, state_indices, made, after)
                calls.attach(key, given, adapter.repeated, *launched)
        return (made, after) if keeps else made

    def check_form(q: Tensor, v: Tensor, *given: bool) -> None:
        """The call is what the kernel was made for: a plan may be run with another than it was prepared for."""
        if (q.dtype, *q.shape[-2:], v.shape[-1], q_len_of(q.shape), *given) != wanted:
            refuse(
                "q",
                f"is {describe(q)}, v {describe(v)}, with{'' if given[0] else 'out'} state"
                f" and with{'' if given[1] else 'out'} indices",
                f"the plan is for {problem.dtype}, {problem.q_len} tokens, {shape},"
                f" with{'' if problem.state else 'out'} state"
                f" and with{'' if problem.state_indices else 'out'} indices",
            )

    return run


def _new_states(q: Tensor, cu_seqlens: Any, one: tuple[int, int, int]) -> Tensor | None:
    """Memory for a state of each sequence; None if a call that was not checked yet does not say of how many."""
    sequences = q.shape[0]
    if q.ndim == 3:
        if type(cu_seqlens) is not Tensor or cu_seqlens.is_nested or not cu_seqlens.ndim:
            return None
        sequences = max(0, cu_seqlens.shape[0] - 1)
    return q.new_empty(sequences, *one, dtype=torch.float32)


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
    """A kernel selected for calls like this: ``run`` takes the op's arguments but ``return_state`` and ``backend``."""

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
    """Linear attention with a decaying state: ``S_t = exp(-decay) S_(t-1) + k_t^T v_t``, ``out_t = scale q_t S_t``.

    A token's own contribution does not decay. A call that starts from a returned state continues the earlier call.

    Args:
        q: ``[B, S, H, D]``, or ragged ``[T, H, D]`` with `cu_seqlens`; float32, float16 or bfloat16.
        k: of the shape and dtype of q.
        v: ``[B, S, H, Dv]``, or ``[T, H, Dv]``, in the same dtype.
        decay: float32 ``[H]``, at least 0: the decrease of the state's log per token (the slopes of lightning
            attention).
        state: float32 ``[N, H, D, Dv]``, the initial state of each of the N sequences; None for zero. With
            `state_indices` ``[slots, H, D, Dv]``, a pool of states.
        cu_seqlens: int32 ``[N + 1]``, offsets at which each sequence of a ragged batch begins and ends. Rows past the
            last offset are not written.
        scale: factor of the result.
        state_indices: int32 ``[N]``, the slot of each sequence in `state` and `out_state`. Slots must be distinct. A
            sequence with a negative slot starts from zero, and its state is not stored.
        out: destination of the result, in the shape and dtype of v; it must overlap no operand.
        out_state: destination of the final states, in the shape of `state`. It may be `state` itself, to update in
            place. Other slots are not written. If it is given, it is returned.
        return_state: also return the states; without `out_state` a new ``[N, H, D, Dv]``, also with `state_indices`.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    On a GPU only ``KERNELHUB_CHECK=1`` checks the values of decays, offsets and slots.

    Returns:
        The result in the shape and dtype of v; with `return_state` or `out_state` also the states, float32.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

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
    if type(q) is not Tensor and isinstance(q, Tensor) and not isinstance(backend, DryRun):
        return _op.traced(**locals())
    if _op.again is not None:
        again: Any | None = _op.again(
            q, k, v, decay, state, cu_seqlens, scale, state_indices, out, out_state, return_state, backend
        )
        if again is not None:
            return again
    try:
        shape = q.shape
        if type(return_state) is not bool:  # 1 would be taken for the key's True
            return_state = check_flag(NAME, "return_state", return_state)
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
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        check(q, k, v, decay, state, cu_seqlens, scale, state_indices, out, out_state, return_state)
        raise
    run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None:
        check(q, k, v, decay, state, cu_seqlens, scale, state_indices, out, out_state, return_state)
        run = _op.decide(key, q.get_device(), backend)
        operands = (q, k, v, decay, state, cu_seqlens, scale, state_indices, out, out_state)
        return _checked.run(operands, run, *operands)
    return run(q, k, v, decay, state, cu_seqlens, scale, state_indices, out, out_state)
