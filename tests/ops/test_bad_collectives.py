"""Arguments of collectives that break the contract: one error that names the parameter, on a first and a warm call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist

import kernelhub
from kernelhub.errors import InvalidArgument, NoKernel
from kernelhub.ops.comm.inputs import alone

z = torch.zeros
CPU = torch.device("cpu")


def given(**changes: Any) -> dict[str, Any]:
    return {"x": z(4, 2), "group": alone(CPU)} | changes


BAD = [
    ("x", given(x=3), "is int"),
    ("x", given(x=z(4, 2).int()), "int32"),
    ("x", given(x=z(4, 2, device="meta")), "meta"),
    ("x", given(x=z(4, 2, requires_grad=True)), "requires grad"),
    ("x", given(x=z(4, 2).to_sparse()), "layout"),
    ("group", given(group=None), "is NoneType"),
    ("group", given(group="nobody"), "is 'nobody', which is not registered"),
    ("group", given(group=dist.GroupMember.NON_GROUP_MEMBER), "excludes this process"),
    ("out", given(out=z(4, 3)), r"\[4, 3\]"),
    ("out", given(out=z(4, 2).half()), "float16"),
    ("out", given(out=z(4, 2, device="meta")), "meta"),
    ("out", given(out=z(1, 2).expand(4, 2)), "out"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("parameter", "arguments", "words"), BAD)
def test_the_parameter_is_named(parameter: str, arguments: dict[str, Any], words: str, warm: bool) -> None:
    if warm:
        kernelhub.all_reduce(**given())
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.all_reduce(**arguments)
    assert caught.value.parameter == parameter
    assert sum(row.calls for row in kernelhub.report().rows) == int(warm)


def test_a_destination_may_be_the_operand_and_not_overlap_it() -> None:
    x = torch.arange(12.0)
    assert kernelhub.all_reduce(x[:8], alone(CPU), out=x[:8]).data_ptr() == x.data_ptr()
    with pytest.raises(InvalidArgument, match="overlaps x"):
        kernelhub.all_reduce(x[:8], alone(CPU), out=x[4:])
    assert torch.equal(x, torch.arange(12.0))


def test_a_plan_refuses_what_it_was_not_prepared_for() -> None:
    plan = kernelhub.all_reduce.prepare(**given())
    assert torch.equal(plan.run(torch.ones(7)), torch.ones(7))
    with pytest.raises(InvalidArgument, match="the plan is for float32"):
        plan.run(z(4, 2).half())


def test_a_backend_other_than_the_usual_is_rejected() -> None:
    selection = kernelhub.explain("all_reduce", device="CPU", group_backend="other")
    assert selection.selected is None
    with pytest.raises(NoKernel, match="neither NCCL for a GPU nor gloo for a CPU"):
        raise kernelhub.all_reduce.op.no_kernel(selection, None)
