"""`concat_mla_k`: concatenates the two parts of latent attention's keys, for every head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import alike, check_wants_no_gradient, dense, describe, dtype_name, usable
from kernelhub.ops.call_plan import CallPlan, prepares
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.mla.concat.adapter import ConcatAdapter
from kernelhub.ops.mla.concat.problem import CONCAT_MLA_K, DTYPES, ConcatProblem
from kernelhub.ops.mla.concat.reference import concat_mla_k_reference
from kernelhub.ops.operands import check_destination, check_operand, is_plain_view, may_overlap, transformed
from kernelhub.ops.operators import Traced
from kernelhub.probes.device import facts_of

NAME = "concat_mla_k"
_DTYPES = tuple(getattr(torch, name) for name in DTYPES)


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def problem_of(key: Any, device: int) -> ConcatProblem:
    """The problem that a key means on a device; the key is built in `concat_mla_k`."""
    dtype, num_heads, nope_dim, rope_dim = key
    return ConcatProblem(
        device=facts_of(device),
        dtype=dtype_name(dtype),
        num_heads=num_heads,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
    )


def check(k_nope: Any, k_rope: Any, out: Any) -> None:
    """Everything that the contract says of a call."""
    given = (("k_nope", k_nope), ("k_rope", k_rope))
    for parameter, tensor in given:
        check_operand(NAME, parameter, tensor)
    if k_nope.ndim != 3:
        refuse("k_nope", f"has shape {list(k_nope.shape)}", "give [T, H, N]")
    if k_nope.dtype not in _DTYPES:
        refuse("k_nope", f"has dtype {dtype_name(k_nope.dtype)}", f"give {', '.join(DTYPES)}")
    tokens, heads, width = k_nope.shape
    if 0 in (heads, width):
        refuse("k_nope", f"has shape {list(k_nope.shape)}", "give at least one head and one element of each")
    if k_rope.ndim not in (2, 3) or k_rope.shape[0] != tokens or (k_rope.ndim == 3 and k_rope.shape[1] != 1):
        refuse("k_rope", f"has shape {list(k_rope.shape)}", f"give [{tokens}, R] or [{tokens}, 1, R]")
    if k_rope.shape[-1] == 0:
        refuse("k_rope", f"has shape {list(k_rope.shape)}", "give at least one element")
    for parameter, tensor in given:
        if tensor.dtype is not k_nope.dtype:
            refuse(parameter, f"has dtype {dtype_name(tensor.dtype)}", f"k_nope has {dtype_name(k_nope.dtype)}")
        if tensor.device != k_nope.device:
            refuse(parameter, f"is on {tensor.device}", f"move it to {k_nope.device}, where k_nope is")
        check_wants_no_gradient(NAME, parameter, tensor)
    if out is not None:
        whole = (tokens, heads, width + k_rope.shape[-1])
        check_operand(NAME, "out", out)
        in_place = stands_in(k_nope, out)
        operands = {"k_rope": k_rope} if in_place else {"k_nope": k_nope, "k_rope": k_rope}
        check_destination(NAME, "out", out, whole, k_nope.dtype, k_nope.device, operands)


def stands_in(k_nope: Tensor, out: Tensor) -> bool:
    """k_nope is the view of out where its result belongs."""
    return k_nope.data_ptr() == out.data_ptr() and k_nope.stride() == out.stride()


def bind(
    adapter: Any,
    problem: ConcatProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the destination, the launch."""
    launch, calls, repeats = adapter.launch, KnownCalls(adapter.launch), is_repeated(adapter)
    recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds
    form = (getattr(torch, problem.dtype), problem.num_heads, problem.nope_dim, problem.rope_dim)
    dtype, num_heads, nope_dim, rope_dim = form
    width = nope_dim + rope_dim

    def known(k_nope: Tensor, k_rope: Tensor, out: Tensor | None) -> bool:
        """Whether `check` would accept the operands and they fit the kernel."""
        if not usable(k_nope, dtype, device) or k_nope.ndim != 3 or type(k_rope) is not Tensor:
            return False
        tokens, heads, columns = k_nope.shape
        if (
            heads != num_heads
            or columns != nope_dim
            or not alike(k_rope, (tokens, rope_dim) if k_rope.ndim == 2 else (tokens, 1, rope_dim), dtype, device)
            or not (is_plain_view(k_nope) and is_plain_view(k_rope))  # views, as a rule
        ):
            return False
        if out is None:
            return True
        if not alike(out, (tokens, heads, width), dtype, device) or not out.is_contiguous():
            return False
        return not may_overlap(out, (None if stands_in(k_nope, out) else k_nope, k_rope))

    def run(k_nope: Tensor, k_rope: Tensor, out: Tensor | None) -> Tensor:
        if k_nope.get_device() != device:
            result: Tensor = elsewhere(k_nope.get_device())(k_nope, k_rope, out)
            return result
        key: Any = None
        state: int = 0
        if not k_nope.is_nested and type(k_rope) is Tensor:
            key = k_nope.shape, k_rope.ndim
            if key in calls and dense(k_nope, dtype, device):
                whole = k_nope.new_empty(k_nope.shape[0], num_heads, width) if out is None else out
                state = recognise(key, (k_nope, k_rope, whole))
                if state == 2:
                    tick()
                    return whole
                if state:
                    out = whole
        try:
            right = state == 1 or (not transformed() and known(k_nope, k_rope, out))
        except (AttributeError, RuntimeError):  # what has no shape or no memory; `check` names it
            right = False
        if not right:
            check(k_nope, k_rope, out)
            if (k_nope.dtype, *k_nope.shape[1:], k_rope.shape[-1]) != form:
                wanted = f"the plan is for {problem.dtype} [T, {num_heads}, {nope_dim}] and [T, {rope_dim}]"
                refuse("k_nope", f"is {describe(k_nope)} with a k_rope of {describe(k_rope)}", wanted)
        if out is None:
            out = k_nope.new_empty(k_nope.shape[0], num_heads, width)
        if not state:
            calls.learn(key, (k_nope, k_rope, out), 1)
        if out.shape[0]:
            rope = k_rope.squeeze(1) if k_rope.ndim == 3 else k_rope
            tick()
            try:
                launched = None if stands_in(k_nope, out) else k_nope, rope, out
                launch(*launched)
            except Exception as error:
                failed(launch, error)
                check(k_nope, k_rope, out)
                raise
            if state and repeats:
                calls.attach(key, (k_nope, k_rope, out), adapter.repeated, *launched)
        return out

    return run


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
    """A kernel selected for keys like these: ``run(k_nope, k_rope, out=None)`` is a whole call."""

    __slots__ = ()
    call = "k_nope, k_rope, out"


def _memory(k_nope: Tensor, k_rope: Tensor, **others: Any) -> dict[str, Tensor]:
    return {"out": k_nope.new_empty((*k_nope.shape[:2], k_nope.shape[2] + k_rope.shape[-1]))}


@publish(_op, prepares(_op, ConcatPlan), traced=Traced(_memory))
def concat_mla_k(k_nope: Tensor, k_rope: Tensor, out: Tensor | None = None, backend: Backend = None) -> Tensor:
    """Concatenate each head's non-rotary part of the keys with the rotary part that all heads share.

    Args:
        k_nope: ``[T, H, N]``, float32, float16, bfloat16 or float8_e4m3fn; usually a view of the up-projected latent.
        k_rope: ``[T, R]`` or ``[T, 1, R]`` in the same dtype.
        out: destination ``[T, H, N + R]``. If k_nope is its view ``out[..., :N]``, only the rotary part is written.
            It must not overlap the operands otherwise.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        ``[T, H, N + R]``, an exact copy of the operands: keys for `attention` with a v of another width.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        DeepSeek-V2 (2024), section 2.1; FlashInfer's function of the same name.

    Example:
        >>> import torch, kernelhub
        >>> kernelhub.concat_mla_k(torch.randn(10, 16, 128), torch.randn(10, 64)).shape
        torch.Size([10, 16, 192])
    """
    if type(k_nope) is not Tensor and isinstance(k_nope, Tensor) and not isinstance(backend, DryRun):
        traced: Tensor = _op.traced(**locals())
        return traced
    if _op.again is not None:
        again: Tensor | None = _op.again(k_nope, k_rope, out, backend)
        if again is not None:
            return again
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
