"""What calls of `all_reduce` and `reduce_scatter` share: checks of x, and the function that a call runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.dispatch.hub import HUB
from kernelhub.ops.arguments import check_wants_no_gradient, dense, describe, dtype_name, refuse
from kernelhub.ops.comm.comparing import comparing
from kernelhub.ops.comm.known import GroupCalls, group_type, plain_operand, plain_place
from kernelhub.ops.comm.preparing import TIMEOUT
from kernelhub.ops.comm.problem import FLOATS, CollectiveProblem
from kernelhub.ops.comm.refusing import failed_launch
from kernelhub.ops.operands import check_operand

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DTYPES = tuple(getattr(torch, name) for name in FLOATS)
Check = Callable[[Any, Any, Any], "ProcessGroup"]


def check_summed(op: str, x: Any) -> None:
    """Floats that require no gradient."""
    check_operand(op, "x", x)
    if x.dtype not in _DTYPES:
        refuse(op, "x", f"has dtype {dtype_name(x.dtype)}", f"give {', '.join(FLOATS)}")
    check_wants_no_gradient(op, "x", x)


def summed(x: Tensor) -> dict[str, str]:
    """What of a call must be equal on all ranks, as plain values."""
    return {"x": describe(x)}


def binds(op: str, check: Check, *, in_parts: bool) -> Callable[..., Callable[..., Any]]:
    """The `bind` of a sum.

    Args:
        op: name of the op.
        check: everything that the contract says of a call; it returns the group.
        in_parts: whether a rank gets its part of the rows, not the whole sum.
    """

    def bind(
        adapter: Any,
        problem: CollectiveProblem,
        device: int,
        tick: Callable[[], int],
        elsewhere: Callable[[int], Callable[..., Any]],
    ) -> Callable[..., Any]:
        """The function that a call runs: checks, destination, launch. A rank without rows launches, too."""
        launch, timeout_s, groups = adapter.launch, HUB.settings[TIMEOUT], group_type()
        dtype, world_size = getattr(torch, problem.dtype), problem.world_size
        known, compare = GroupCalls(adapter), comparing(op, adapter, timeout_s)

        def made_for(x: Tensor) -> Tensor:
            return x.new_empty(x.shape[0] // world_size, *x.shape[1:]) if in_parts else x.new_empty(x.shape)

        def is_part(out: Any, x: Tensor) -> bool:
            return out is not x and plain_place(out, (x.shape[0] // world_size, *x.shape[1:]), dtype, device, (x,))

        def run(x: Tensor, group: ProcessGroup | str, out: Tensor | None) -> Tensor:
            usual = type(group) is groups
            key: Any = None
            again, made = 0, out
            if usual and not getattr(x, "is_nested", True):
                key, calls = (x.shape, out is x, out is None), known.of(group)
                ready = calls.results.get(key)
                if ready is not None:
                    given: tuple[Any, ...] = (x, *ready.take())
                    if calls.launches(key, given) == 2:
                        tick()
                        return given[1]  # type: ignore[no-any-return]
                if key in calls and (out is not None or dense(x, dtype, device)):
                    made = made_for(x) if out is None else out
                    again = known.again(calls, key, (x, None if out is x else made))
                    if again == 2:
                        tick()
                        assert made is not None
                        if out is None:
                            known.make_ready(calls, key, made)
                        return made
            if again:
                pg: Any = group
            elif (
                usual
                and plain_operand(x, dtype, device)
                and not (in_parts and (not x.ndim or x.shape[0] % world_size))
                and (out is None or (is_part(out, x) if in_parts else plain_place(out, x.shape, dtype, device, (x,))))
            ):
                pg = group
            else:
                key = None
                pg = check(x, group, out)
                if x.get_device() != device:
                    result: Tensor = elsewhere(x.get_device())(x, pg, out)
                    return result
                if x.dtype is not dtype:
                    refuse(op, "x", f"is {describe(x)}", f"the plan is for {problem.dtype}")
            if pg.size() != world_size:
                refuse(op, "group", f"has {pg.size()} ranks", f"the plan is for {world_size}")
            if made is None:
                made = made_for(x)
            given = (x, None if out is x else made)
            if key is not None and not again:
                calls.learn(key, given, int(out is not x), int(out is None))
            if compare is not None:
                compare(pg, summed(x))
            tick()
            try:
                launch(x, made, pg, timeout_s)
            except Exception as error:
                failed_launch(launch, error)
                raise
            if again:
                known.attach(calls, key, given, x, made, pg, timeout_s)
            return made

        return run

    return bind
