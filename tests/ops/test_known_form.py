"""A form that a check let through is told again, and everything that a check would refuse is not it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernelhub.ops import known_form
from kernelhub.ops.known_form import KnownForm


class Own(torch.Tensor):
    pass


@pytest.fixture(params=["torch's guards", "python"], autouse=True)
def compared_by(request, monkeypatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(known_form, "_form_maker", lambda: known_form._compared)
    else:
        assert known_form._form_maker() is known_form._guards_of


def learned(*tensors: torch.Tensor, strided: tuple[int, ...] = ()) -> KnownForm:
    form = KnownForm()
    form.learn(tensors, [(None, *tensor.shape[1:]) for tensor in tensors], strided)
    return form


def test_nothing_is_known_at_first() -> None:
    assert not KnownForm().holds(torch.zeros(2))


def test_tensors_of_the_form_are_let_through_in_any_number_of_rows() -> None:
    form = learned(torch.zeros(2, 3), torch.zeros(4, 5, dtype=torch.int32))
    assert form.holds(torch.ones(7, 3), torch.ones(1, 5, dtype=torch.int32))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda x: x.double(), id="dtype"),
        pytest.param(lambda x: torch.zeros(2, 4), id="width"),
        pytest.param(lambda x: x.unsqueeze(0), id="rank"),
        pytest.param(lambda x: x.to("meta"), id="meta"),
        pytest.param(lambda x: x.to_sparse(), id="sparse"),
        pytest.param(lambda x: torch._neg_view(x), id="negative bit"),
        pytest.param(lambda x: x.clone().requires_grad_(), id="gradient"),
        pytest.param(lambda x: x.as_subclass(Own), id="subclass"),
        pytest.param(lambda x: None, id="None"),
        pytest.param(lambda x: [0.0], id="list"),
    ],
)
def test_what_a_check_has_to_look_at_is_not_let_through(other: Any) -> None:
    tensor = torch.zeros(2, 3)
    form = learned(tensor, tensor)
    assert not form.holds(other(tensor), tensor)
    assert not form.holds(tensor, other(tensor))


def test_a_tensor_inside_a_transform_is_not_let_through() -> None:
    form = learned(torch.zeros(3))
    seen = []
    torch.func.vmap(lambda row: seen.append(form.holds(row)) or row)(torch.zeros(2, 3))
    assert seen == [False]


def test_strides_are_compared_on_request() -> None:
    tensor = torch.zeros(2, 3)
    assert learned(tensor).holds(torch.zeros(3, 2).T)
    assert not learned(tensor, strided=(0,)).holds(torch.zeros(3, 2).T)


def test_a_tensor_that_is_given_twice_is_accepted_and_checked_as_strictly() -> None:
    """As keys that are the values, too."""
    one, other = torch.zeros(2, 3), torch.zeros(2, 3)
    form = KnownForm()
    form.learn((other, one, one), [(None, 3), (None, 3), (2, None)], strided=(2,))
    assert form.holds(other, one, one)
    for wrong in (torch.zeros(5, 3), torch.zeros(2, 4), torch.zeros(3, 2).T, one.double(), None):
        assert not form.holds(other, wrong, wrong)
        assert not form.holds(other, one, wrong)


def test_autocast_and_inference_mode_request_a_form_of_their_own() -> None:
    """So that what was checked outside of them is not taken for checked inside."""
    tensor = torch.zeros(2, 3)
    form = learned(tensor)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not form.holds(tensor)
    with torch.inference_mode():
        assert not form.holds(torch.zeros(2, 3))
        again = learned(torch.zeros(2, 3))
        assert again.holds(torch.zeros(2, 3))
    assert form.holds(tensor)
