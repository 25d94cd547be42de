"""How a call of `topk_indices` becomes a launch: its problem, its checks, its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from kernelhub.dispatch.lost import failed
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import alike, usable
from kernelhub.ops.indexer.arguments import check_tensor
from kernelhub.ops.indexer.problem import TopKProblem
from kernelhub.ops.operands import (
    check_count,
    check_destination,
    check_operand,
    check_untransformed,
    is_plain_view,
    may_overlap,
)
from kernelhub.probes.device import facts_of

NAME = "topk_indices"
_INT32, _FLOAT32 = (torch.int32,), (torch.float32,)


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def problem_of(key: Any, device: int) -> TopKProblem:
    """The problem that a key means on a device; the key is built in `topk_indices`."""
    k, has_starts, has_ends = key
    return TopKProblem(
        device=facts_of(device),
        k=k,
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
    launch = adapter.launch
    form = (problem.k, problem.row_starts, problem.row_ends)
    wanted, float32, int32 = problem.k, torch.float32, torch.int32

    def known(logits: Tensor, k: int, row_starts: Tensor | None, row_ends: Tensor | None, out: Tensor | None) -> bool:
        """Nothing that `check` would refuse, and what the kernel was made for."""
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
        try:
            right = known(logits, k, row_starts, row_ends, out)
        except (AttributeError, RuntimeError):  # what has no shape or no memory; `check` names it
            right = False
        if not right:
            check(logits, k, row_starts, row_ends, out)
            if (k, row_starts is not None, row_ends is not None) != form:
                has = ("with" if given else "no" for given in form[1:])
                bounds = "{} starts and {} ends".format(*has)
                refuse("k", f"is {k}, or bounds of rows differ", f"the plan is for {problem.k} of rows {bounds}")
        else:
            check_untransformed(NAME, {"logits": logits})
        if out is None:
            out = logits.new_empty((logits.shape[0], k), dtype=int32)
        if out.numel():
            tick()
            try:
                launch(logits, row_starts, row_ends, out)
            except Exception as error:
                failed(launch, error)
                check(logits, k, row_starts, row_ends, out)
                raise
        return out

    return run
