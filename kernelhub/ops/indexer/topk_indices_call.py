"""How a call of `topk_indices` becomes a launch: its problem, its checks, its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from kernelhub.dispatch.lost import failed
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import alike, usable
from kernelhub.ops.indexer.arguments import any_tensor, check_tensor
from kernelhub.ops.indexer.problem import TopKProblem
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
    any_tensor(NAME, "logits", logits)
    if logits.ndim != 2:
        refuse("logits", f"has shape {list(logits.shape)}", "give [T, S]")
    rows = logits.shape[0]
    check_tensor(NAME, "logits", logits, logits.shape, _FLOAT32, logits.device)
    if logits.shape[1] >= 1 << 31:
        refuse("logits", f"has {logits.shape[1]} columns", "an index of int32 reaches 2^31 - 1")
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        refuse("k", f"is {k!r}", "give an int from 1 up")
    for parameter, bound in (("row_starts", row_starts), ("row_ends", row_ends)):
        if bound is not None:
            check_tensor(NAME, parameter, bound, (rows,), _INT32, logits.device)
    if out is not None:
        check_tensor(NAME, "out", out, (rows, k), _INT32, logits.device)


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
        return (
            columns < 1 << 31
            and (alike(row_starts, (rows,), int32, device) if form[1] else row_starts is None)
            and (alike(row_ends, (rows,), int32, device) if form[2] else row_ends is None)
            and (out is None or alike(out, (rows, k), int32, device))
        )

    def run(logits: Tensor, k: int, row_starts: Tensor | None, row_ends: Tensor | None, out: Tensor | None) -> Tensor:
        if logits.get_device() != device:
            result: Tensor = elsewhere(logits.get_device())(logits, k, row_starts, row_ends, out)
            return result
        if not known(logits, k, row_starts, row_ends, out):
            check(logits, k, row_starts, row_ends, out)
            if (k, row_starts is not None, row_ends is not None) != form:
                has = ("with" if given else "no" for given in form[1:])
                bounds = "{} starts and {} ends".format(*has)
                refuse("k", f"is {k}, or bounds of rows differ", f"the plan is for {problem.k} of rows {bounds}")
        if out is None:
            out = logits.new_empty((logits.shape[0], k), dtype=int32)
        if out.numel():
            tick()
            try:
                launch(logits, row_starts, row_ends, out)
            except Exception as error:
                failed(launch, error)
                raise
        return out

    return run
