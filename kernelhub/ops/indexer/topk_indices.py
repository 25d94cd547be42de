"""`topk_indices`: the keys that the indexer scored highest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.forms import python_value
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import alike, usable
from kernelhub.ops.call_plan import CallPlan, prepares
from kernelhub.ops.indexer.adapter import TopKAdapter
from kernelhub.ops.indexer.arguments import check_tensor
from kernelhub.ops.indexer.problem import FEW, MANY, MOST_FEW, TOPK_INDICES, TopKProblem
from kernelhub.ops.indexer.reference import topk_indices_reference
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.operands import (
    check_count,
    check_destination,
    check_operand,
    check_untransformed,
    is_plain_view,
    may_overlap,
)
from kernelhub.ops.operators import Traced
from kernelhub.probes.device import facts_of

NAME = "topk_indices"
_INT32, _FLOAT32 = (torch.int32,), (torch.float32,)


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def problem_of(key: Any, device: int) -> TopKProblem:
    """The problem that a key means on a device; the key is built in `topk_indices`."""
    k, has_starts, has_ends, many = key
    return TopKProblem(
        device=facts_of(device),
        k=k,
        rows=MANY if many else FEW,
        row_starts=has_starts,
        row_ends=has_ends,
    )


def check(logits: Any, k: Any, row_starts: Any, row_ends: Any, out: Any) -> None:
    """Everything that the contract says of a call."""
    check_operand(NAME, "logits", logits)
    if logits.ndim != 2:
        refuse("logits", f"has shape {list(logits.shape)}", "give [T, S]")
    rows = logits.shape[0]
    check_tensor(NAME, "logits", logits, logits.shape, _FLOAT32, logits.device)
    if logits.shape[1] >= 1 << 31:
        refuse("logits", f"has {logits.shape[1]} columns", "an index of int32 reaches 2^31 - 1")
    check_count(NAME, "k", k, 1)
    for parameter, bound in (("row_starts", row_starts), ("row_ends", row_ends)):
        if bound is not None:
            check_tensor(NAME, parameter, bound, (rows,), _INT32, logits.device)
    if out is not None:
        operands = {"logits": logits, "row_starts": row_starts, "row_ends": row_ends}
        check_destination(NAME, "out", out, (rows, k), torch.int32, logits.device, operands)


def bind(
    adapter: Any,
    problem: TopKProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the destination, the launch."""
    launch, calls, repeats = adapter.launch, KnownCalls(adapter.launch), is_repeated(adapter)
    recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds
    form = (problem.k, problem.row_starts, problem.row_ends)
    wanted, float32, int32 = problem.k, torch.float32, torch.int32

    def known(logits: Tensor, k: int, row_starts: Tensor | None, row_ends: Tensor | None, out: Tensor | None) -> bool:
        """Whether `check` would accept the operands and they fit the kernel."""
        if type(k) is not int or k != wanted or not usable(logits, float32, device) or logits.ndim != 2:
            return False
        rows, columns = logits.shape
        if not (
            columns < 1 << 31
            and (row_starts is None or row_starts.is_contiguous() or is_plain_view(row_starts))
            and (row_ends is None or row_ends.is_contiguous() or is_plain_view(row_ends))
            and ((logits.is_contiguous() and columns > 1) or is_plain_view(logits))
            and (alike(row_starts, (rows,), int32, device) if form[1] else row_starts is None)
            and (alike(row_ends, (rows,), int32, device) if form[2] else row_ends is None)
        ):
            return False
        if out is None:
            return True
        if not (alike(out, (rows, k), int32, device) and out.is_contiguous()):
            return False
        return not may_overlap(out, (logits, row_starts, row_ends))

    def run(logits: Tensor, k: int, row_starts: Tensor | None, row_ends: Tensor | None, out: Tensor | None) -> Tensor:
        if logits.get_device() != device:
            result: Tensor = elsewhere(logits.get_device())(logits, k, row_starts, row_ends, out)
            return result
        given, key, again, made = (logits, row_starts, row_ends), None, 0, out
        if not logits.is_nested and type(k) is int:
            key = logits.shape, k, out is None
            if out is None and key in calls and logits.layout is torch.strided:
                made = logits.new_empty(logits.shape[0], k, dtype=int32)
            if made is not None:
                again = recognise(key, (*given, made))
                if again == 2:
                    tick()
                    return made
        try:
            right = again == 1 or known(logits, k, row_starts, row_ends, out)
        except (AttributeError, RuntimeError):  # what has no shape or no memory; `check` names it
            right = False
        if not right:
            k = python_value(k)
            check(logits, k, row_starts, row_ends, out)
            if (k, row_starts is not None, row_ends is not None) != form:
                has = ("with" if given else "no" for given in form[1:])
                bounds = "{} starts and {} ends".format(*has)
                refuse("k", f"is {k}, or bounds of rows differ", f"the plan is for {problem.k} of rows {bounds}")
        elif not again:
            check_untransformed(NAME, {"logits": logits})
        if made is None:
            made = logits.new_empty(logits.shape[0], k, dtype=int32)
        if not again:
            calls.learn(key, (*given, made), 1)
        if made.numel():
            tick()
            try:
                launch(*given, made)
            except Exception as error:
                failed(launch, error)
                check(*given[:1], k, *given[1:], out)
                raise
            if again and repeats:
                calls.attach(key, (*given, made), adapter.repeated, *given, made)
        return made

    return run


_op: Op[TopKProblem] = Op(
    Contract.of(
        TOPK_INDICES,
        problem_of=problem_of,
        adapter=TopKAdapter,
        bind=bind,
        reference=topk_indices_reference,
        example="kernelhub.ops.indexer.inputs:topk_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class TopKPlan(CallPlan):
    """A kernel selected for rows like these: ``run(logits, k, row_starts=None, row_ends=None, out=None)``."""

    __slots__ = ()
    call = "logits, k, row_starts, row_ends, out"


def _memory(logits: Tensor, k: int, **others: Any) -> dict[str, Tensor]:
    return {"out": logits.new_empty((logits.shape[0], k), dtype=torch.int32)}


@publish(_op, prepares(_op, TopKPlan), traced=Traced(_memory))
def topk_indices(
    logits: Tensor,
    k: int,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Find the `k` highest logits of each row, exactly, and return their positions in ascending order.

    Every kernel and every run returns the same positions: among equal logits the first ones win. -inf is never
    selected. NaN ranks above all numbers, so that it is not lost.

    Args:
        logits: float32 ``[T, S]``, as of `mqa_logits` and `paged_mqa_logits`.
        k: number of logits to select in each row.
        row_starts: int32 ``[T]``: the first column of each row; None for 0. One below 0 counts as 0.
        row_ends: int32 ``[T]``: the column after each row's last one; None for S. Other columns are not read.
        out: destination, int32 ``[T, k]``.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        int32 ``[T, k]``: positions counted from the row's start, ascending, padded with -1 to `k`.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        DeepSeek-V3.2 (2025), equation 2; `top_k_per_row_prefill` of vLLM and `fast_topk_v2` of SGLang, which also count
        from the row's start, but return positions in any order and break ties arbitrarily.

    Example:
        >>> import torch, kernelhub
        >>> logits = torch.tensor([[3.0, -1.0, 7.0, 3.0], [2.0, 5.0, -torch.inf, -torch.inf]])
        >>> kernelhub.topk_indices(logits, 3)
        tensor([[ 0,  2,  3],
                [ 0,  1, -1]], dtype=torch.int32)
    """
    if type(logits) is not Tensor and isinstance(logits, Tensor) and not isinstance(backend, DryRun):
        traced: Tensor = _op.traced(**locals())
        return traced
    if _op.again is not None:
        again: Tensor | None = _op.again(logits, k, row_starts, row_ends, out, backend)
        if again is not None:
            return again
    if type(k) is not int:  # 8.0 would be taken for the key's 8
        k = python_value(k)
    try:
        device = logits.get_device()
        key = (k, row_starts is not None, row_ends is not None, logits.shape[0] > MOST_FEW)
        run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    except (AttributeError, TypeError, IndexError, RuntimeError):
        check(logits, k, row_starts, row_ends, out)
        raise
    if run is None:
        check(logits, k, row_starts, row_ends, out)
        run = _op.decide(key, device, backend)
    result: Tensor = run(logits, k, row_starts, row_ends, out)
    return result
