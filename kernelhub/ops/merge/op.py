"""`merge_attention_states`: attention over parts of the keys into attention over all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, is_grad_enabled

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import alike, check_wants_no_gradient, dense, describe, dtype_name, lse_shape
from kernelhub.ops.call_plan import CallPlan, Fixed, prepares
from kernelhub.ops.formats import E4M3
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.merge.adapter import MergeAdapter
from kernelhub.ops.merge.problem import MANY, MERGE_ATTENTION_STATES, TWO, MergeProblem
from kernelhub.ops.merge.reference import merge_attention_states_reference
from kernelhub.ops.operands import (
    check_apart,
    check_destination,
    check_flag,
    check_number,
    check_operand,
    finite_and_not_zero,
    share_memory,
)
from kernelhub.ops.operators import Traced
from kernelhub.probes.device import facts_of

NAME = "merge_attention_states"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def problem_of(key: Any, device: int) -> MergeProblem:
    """The problem that a key means on a device; the key is built in `merge_attention_states`."""
    dtype, heads, width, parts, rank, returns_lse, out_scale = key
    return MergeProblem(
        device=facts_of(device),
        dtype=dtype_name(dtype),
        num_heads=heads,
        head_dim=width,
        parts=TWO if parts == 2 else MANY,
        batched=rank == 4,
        lse=returns_lse,
        out_scale=out_scale,
    )


def check(outs: Any, lses: Any, return_lse: Any = False, out_scale: Any = None) -> None:
    """The states, unchecked, and the other facts of a call's key."""
    check_flag(NAME, "return_lse", return_lse)
    for parameter, tensors in (("outs", outs), ("lses", lses)):
        if not isinstance(tensors, list | tuple | Tensor):
            refuse(parameter, f"is {type(tensors).__name__}", "give tensors in a list, or one stacked tensor")
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor):
                refuse(parameter, f"holds {type(tensor).__name__} at {index}", "give torch.Tensors")
            check_operand(NAME, parameter, tensor)
    if len(outs) < 2:
        refuse("outs", f"holds {len(outs)} states", "there is nothing to merge below two")
    if len(lses) != len(outs):
        refuse("lses", f"holds {len(lses)}", f"outs holds {len(outs)}")
    first = outs[0]
    if first.ndim not in (3, 4):
        refuse("outs", f"holds shape {list(first.shape)}", "give [T, H, D] or [B, S, H, D]")
    if first.dtype not in _FLOATS:
        refuse("outs", f"holds dtype {dtype_name(first.dtype)}", "give float32, float16 or bfloat16")
    if 0 in first.shape[-2:]:
        refuse("outs", f"holds shape {list(first.shape)}", "give at least one head of at least one element")
    wanted = lse_shape(first.shape)
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != first.shape or out.dtype is not first.dtype:
            refuse("outs", f"holds {describe(out)} at {index}", f"the first is {describe(first)}")
        if lse.shape != wanted or lse.dtype is not torch.float32:
            refuse("lses", f"holds {describe(lse)} at {index}", f"give float32 {list(wanted)}")
        for parameter, tensor in (("outs", out), ("lses", lse)):
            if tensor.device != first.device:
                refuse(parameter, f"holds one on {tensor.device} at {index}", f"move it to {first.device}")
            if tensor.requires_grad and is_grad_enabled():
                refuse(parameter, f"requires grad at {index}", "kernels are for inference; call under torch.no_grad()")
    _check_scale(out_scale, first)


def _check_scale(scale: Any, first: Tensor) -> float | Tensor | None:
    """Check the scale of a float8 result, if there is one."""
    if scale is None:
        return None
    if isinstance(scale, Tensor):
        check_operand(NAME, "out_scale", scale)
        if scale.dtype is not torch.float32 or scale.numel() != 1:
            refuse("out_scale", f"is {describe(scale)}", "give float32 of one element, or a float")
        if scale.device != first.device:
            refuse("out_scale", f"is on {scale.device}", f"move it to {first.device}")
        check_wants_no_gradient(NAME, "out_scale", scale)
        return scale
    fix = "give a finite float other than 0, or float32 of one element"
    return check_number(NAME, "out_scale", scale, fix, finite_and_not_zero)


def check_form(first: Tensor, parts: int, problem: MergeProblem) -> None:
    """States are those that the kernel was made for: a plan may be run with others than it was prepared for."""
    form = (dtype_name(first.dtype), first.shape[-2], first.shape[-1], first.ndim == 4, TWO if parts == 2 else MANY)
    wanted = (problem.dtype, problem.num_heads, problem.head_dim, problem.batched, problem.parts)
    if form != wanted:
        shape = f"{'[B, S' if problem.batched else '[T'}, {problem.num_heads}, {problem.head_dim}]"
        refuse(
            "outs",
            f"holds {parts} states of {describe(first)}",
            f"the plan is for {problem.parts} of {problem.dtype} {shape}",
        )


def check_out(
    out: Any, outs: Sequence[Tensor], lses: Sequence[Tensor], dtype: torch.dtype, out_scale: Any = None
) -> None:
    """The destination of the result."""
    _check_place("out", out, outs[0], dtype, "outs", outs)
    check_apart(NAME, "out", out, _scale_in_memory(out_scale) | _parts("lses", lses))


def check_out_lse(
    out_lse: Any, outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor | None, out_scale: Any = None
) -> None:
    """The destination of the LSE."""
    _check_place("out_lse", out_lse, lses[0], torch.float32, "lses", lses)
    check_apart(NAME, "out_lse", out_lse, {"out": out, **_scale_in_memory(out_scale), **_parts("outs", outs)})


def _scale_in_memory(out_scale: Any) -> dict[str, Tensor]:
    return {"out_scale": out_scale} if isinstance(out_scale, Tensor) else {}


def _check_place(parameter: str, given: Any, like: Tensor, dtype: torch.dtype, parts: str, given_parts: Any) -> None:
    """A destination that overlaps no part, or is one of them, element by element."""
    check_destination(NAME, parameter, given, like.shape, dtype, like.device, {})
    for index, part in enumerate(given_parts):
        if share_memory(given, part) and not _same_place(given, part):
            fix = "give memory of its own, or that part itself"
            refuse(parameter, f"overlaps {parts}[{index}] in memory", fix)


def _same_place(one: Tensor, other: Tensor) -> bool:
    """Whether each element of one tensor is that element of the other."""
    return one.data_ptr() == other.data_ptr() and one.dtype is other.dtype and one.stride() == other.stride()


def bind(
    adapter: Any,
    problem: MergeProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the destinations, the launch."""
    launch, calls, repeats = adapter.launch, KnownCalls(adapter.launch), is_repeated(adapter)
    recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds
    ndim, two = 4 if problem.batched else 3, problem.parts == TWO
    num_heads, head_dim, scaled = problem.num_heads, problem.head_dim, problem.out_scale
    returns_lse, dtype, float32 = problem.lse, getattr(torch, problem.dtype), torch.float32
    out_dtype = dtype if scaled is None else E4M3

    def known(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> bool:
        """Nothing that `check` or `check_form` would refuse."""
        shape, count = outs[0].shape, len(outs)
        if len(shape) != ndim or shape[-2] != num_heads or shape[-1] != head_dim or (count == 2) is not two:
            return False
        if type(outs) is not type(lses) or len(lses) != count:
            return False
        wanted = (num_heads, shape[0]) if ndim == 3 else (shape[0], num_heads, shape[1])
        try:
            for tensor in outs:
                if not alike(tensor, shape, dtype, device) or not tensor.is_contiguous():
                    return False
            for tensor in lses:
                if not alike(tensor, wanted, float32, device) or not tensor.is_contiguous():
                    return False
        except RuntimeError:  # compressed rows have no such question
            return False
        return True

    def run(
        outs: Sequence[Tensor],
        lses: Sequence[Tensor],
        out: Tensor | None,
        out_lse: Tensor | None,
        out_scale: float | Tensor | None = None,
    ) -> Any:
        first = outs[0]
        if first.get_device() != device:
            return elsewhere(first.get_device())(outs, lses, out, out_lse, out_scale)
        key, read = _known_as(outs, lses, out_scale)
        if (
            key in calls
            and dense(first, dtype, device)
            and dense(lses[0], float32, device)
            and (out_lse is None or returns_lse)
        ):
            whole, sums = made(first, lses[0], out, out_lse)
            state = recognise(key, (*read, whole, sums))
            if state:
                if state == 2:
                    tick()
                else:
                    launched = launch_all(outs, lses, whole, sums, out_scale)
                    if repeats and launched:
                        calls.attach(key, (*read, whole, sums), adapter.repeated, *launched)
                return whole if sums is None else (whole, sums)
        simple = known(outs, lses)  # and all contiguous
        if not simple:
            check(outs, lses)
            check_form(first, len(outs), problem)
        if out_scale is not None:
            out_scale = _check_scale(out_scale, first)
        apart = (*lses, out_scale) if isinstance(out_scale, Tensor) else lses  # and not as `out` may be a part
        if out is not None and not (
            simple and alike(out, first.shape, out_dtype, device) and lies_apart(out, outs, apart)
        ):
            check_out(out, outs, lses, out_dtype, out_scale)
        if out_lse is not None and not returns_lse:
            refuse("out_lse", "is given to a plan without LSE", "prepare it with return_lse=True")
        whole, sums = made(first, lses[0], out, out_lse)
        if out_lse is not None and not (
            simple
            and alike(out_lse, lses[0].shape, float32, device)
            and lies_apart(out_lse, lses, (*outs, whole, *apart[len(lses) :]))
        ):
            check_out_lse(out_lse, outs, lses, whole, out_scale)
        calls.learn(key, (*read, whole, sums), 1 if sums is None else 2)
        launch_all(outs, lses, whole, sums, out_scale)
        return whole if sums is None else (whole, sums)

    def made(first: Tensor, lse: Tensor, out: Tensor | None, out_lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The destinations, as given or new."""
        if out is None:
            out = torch.empty_like(first, dtype=out_dtype, memory_format=torch.contiguous_format)
        if out_lse is None and returns_lse:
            out_lse = torch.empty_like(lse, memory_format=torch.contiguous_format)
        return out, out_lse

    def launch_all(outs: Any, lses: Any, out: Tensor, lse: Tensor | None, scale: float | Tensor | None) -> Any:
        """Launch, and return with what; None if there is nothing to merge."""
        if not out.numel():
            return None
        # A kernel without the feature need not take a scale.
        given = (outs, lses, out, lse) if scale is None else (outs, lses, out, lse, scale)
        tick()
        try:
            launch(*given)
        except Exception as error:
            failed(launch, error)
            raise
        return given

    return run


def _known_as(outs: Any, lses: Any, scale: Any) -> tuple[Any, tuple[Any, ...]]:
    """Key and operands of a call, as `KnownCalls` takes them; the key is None for a call that has to be checked."""
    of_scale = None if scale is None or isinstance(scale, Tensor) else scale
    if isinstance(outs, Tensor):
        parts = (outs, lses) if isinstance(lses, Tensor) and not outs.is_nested else None
    else:
        parts = (*outs, *lses) if type(outs) is type(lses) and len(outs) == len(lses) else None
    if parts is None or (of_scale is not None and type(of_scale) is not float) or parts[0].is_nested:
        return None, ()
    return (type(outs), len(outs), parts[0].shape, of_scale), (*parts, None if of_scale is not None else scale)


def lies_apart(out: Tensor, like: Sequence[Tensor] | Tensor, others: Sequence[Tensor] | Tensor) -> bool:
    """A contiguous destination that shares no memory with contiguous tensors, or is one of those that it is like.

    Args:
        out: the destination.
        like: tensors of the shape of `out`.
        others: tensors none of which is larger than the first of them.
    """
    try:
        if not out.is_contiguous():
            return False
    except RuntimeError:  # compressed rows have no such question
        return False
    start, size, dtype = out.data_ptr(), out.nbytes, out.dtype
    least = -size if like[0].dtype is dtype else -like[0].nbytes
    for part in like:
        distance = part.data_ptr() - start
        if least < distance < size and (distance or part.dtype is not dtype):
            return False
    least = -others[0].nbytes
    for part in others:  # noqa: SIM110 - a generator costs more than all of this
        if least < part.data_ptr() - start < size:
            return False
    return True


def _parts(parameter: str, parts: Sequence[Tensor] | Tensor) -> dict[str, Tensor]:
    return {f"{parameter}[{index}]": part for index, part in enumerate(parts)}


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
    """A kernel selected for states like these: ``run(outs, lses, out=None, out_lse=None)`` is a whole call.

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
        lses: natural logs of their softmax denominators, float32 ``[H, T]``, or ``[B, H, S]``, as `attention` and
            `paged_attention` return them. -inf or +inf means that the part has no key for that query; its result
            is then not read.
        out: destination. Without `out_scale` it may be one of `outs`, to merge in place. It must not overlap them
            otherwise.
        out_lse: destination of the merged LSE. It may be one of `lses` and must not overlap them otherwise. If it is
            given, the LSE is returned.
        return_lse: also return the merged LSE.
        out_scale: divide the merged result by this and return float8_e4m3fn, saturated at 448: a float other than 0,
            or float32 of one element.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        The merged result in the shape and dtype of each, or in float8_e4m3fn with `out_scale`; with `return_lse` also
        the LSE. A query without a key in any part gives zeros and -inf.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

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
    if _op.again is not None:
        again: Any | None = _op.again(outs, lses, out, out_lse, return_lse, out_scale, backend)
        if again is not None:
            return again
    try:
        if type(outs[0]) is not Tensor and isinstance(outs[0], Tensor) and not isinstance(backend, DryRun):
            return _op.traced(outs, lses, out, out_lse, return_lse, out_scale, backend)
        if return_lse is not True and return_lse is not False:
            return_lse = check_flag(NAME, "return_lse", return_lse)
        first = outs[0]
        shape = first.shape
        key = (
            first.dtype,
            shape[-2],
            shape[-1],
            2 if len(outs) == 2 else 3,
            len(shape),
            return_lse or out_lse is not None,
            None if out_scale is None else "tensor" if isinstance(out_scale, Tensor) else "value",
        )
    except (AttributeError, TypeError, ValueError, LookupError, RuntimeError):
        check(outs, lses, return_lse, out_scale)
        raise
    run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None:
        check(outs, lses, return_lse, out_scale)
        if isinstance(backend, DryRun):
            if out is not None:
                check_out(out, outs, lses, first.dtype if out_scale is None else E4M3, out_scale)
            if out_lse is not None:
                check_out_lse(out_lse, outs, lses, out, out_scale)
        run = _op.decide(key, first.get_device(), backend)
    return run(outs, lses, out, out_lse, out_scale)
