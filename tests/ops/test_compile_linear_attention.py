"""Linear attention under torch.compile: at most two graphs over sizes, the same numbers, states written in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernelhub
from kernelhub.ops.linear_attention.inputs import linear_inputs
from kernelhub.ops.models.shapes import LinearModel
from tests.conftest import DEVICE
from tests.ops.test_compile import compiled

SMALL = LinearModel("small", 2, 16, 8)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def arguments_of(**changes: Any) -> dict[str, Any]:
    return linear_inputs(SMALL, **{"batch": 2, "tokens": 20, "device": DEVICE} | changes)


@pytest.mark.parametrize("returns", [False, True], ids=["result", "and states"])
def test_at_most_two_graphs_over_sizes(returns: bool) -> None:
    run, counter = compiled(lambda a: kernelhub.linear_attention(**a, return_state=returns))
    for batch in (2, 3, 9, 17):
        arguments = arguments_of(batch=batch, state=True)
        got, want = run(arguments), kernelhub.linear_attention(**arguments, return_state=returns)
        for one, wanted in zip(got, want, strict=True) if returns else ((got, want),):
            assert torch.equal(one, wanted)
    assert counter.frame_count <= 2


def test_states_of_a_pool_go_on_in_place() -> None:
    run, counter = compiled(lambda a: kernelhub.linear_attention(**a, out_state=a["state"])[0] * 1)
    arguments = arguments_of(slots=(3, -1))
    want, want_states = kernelhub.linear_attention(**arguments, out_state=arguments["state"].clone())
    assert torch.equal(run(arguments), want)
    assert torch.equal(arguments["state"], want_states)
    assert counter.frame_count == 1


def test_destinations_are_written() -> None:
    run, _ = compiled(lambda a, out: kernelhub.linear_attention(**a, out=out, return_state=True))
    arguments = arguments_of(lengths=(5, 9), slots=(1, 0))
    want, want_states = kernelhub.linear_attention(**arguments, return_state=True)
    out = torch.full_like(want, torch.nan)
    got, states = run(arguments, out)
    assert torch.equal(got, want)
    assert torch.equal(out, want)
    assert torch.equal(states, want_states)
    alone, _ = compiled(lambda a, out: kernelhub.linear_attention(**a, out=out))
    out.fill_(torch.nan)
    assert torch.equal(alone(arguments, out), want)


def test_a_plan_runs_inside() -> None:
    arguments = arguments_of(state=True)
    plan = kernelhub.linear_attention.prepare(**arguments, return_state=True)
    run, _ = compiled(lambda a: plan.run(**a))
    for got, want in zip(run(arguments), plan.run(**arguments), strict=True):
        assert torch.equal(got, want)


def test_fake_tensors_give_the_shapes() -> None:
    with FakeTensorMode():
        q, v = torch.empty(7, 2, 16, dtype=torch.bfloat16), torch.empty(7, 2, 8, dtype=torch.bfloat16)
        decay, offsets = torch.empty(2), torch.empty(4, dtype=torch.int32)
        out, states = kernelhub.linear_attention(q, q, v, decay, cu_seqlens=offsets, return_state=True)
    assert (tuple(out.shape), out.dtype) == ((7, 2, 8), torch.bfloat16)
    assert (tuple(states.shape), states.dtype) == ((3, 2, 16, 8), torch.float32)
