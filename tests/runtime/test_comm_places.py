"""`tests/gpu/comm_places.py` finds what a run could do wrong with the places that it is given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.ops.comm.inputs import alone
from tests.gpu import comm_places

CALLS = 200
KINDS = comm_places.kinds_of("all_reduce", quantised=False)


def wrong(run: Callable[..., Tensor]) -> list[str]:
    x = torch.arange(24.0).view(3, 8).bfloat16()
    return comm_places.eager(run, KINDS, [([x], {"out": x.clone()}), ([x + 1], {"out": x + 1})], CALLS, 0)


def into(x: Tensor, out: Tensor) -> Tensor:
    return kernelhub.all_reduce(x, alone(x.device), out=out)


def test_the_op_is_right_in_all_places() -> None:
    assert wrong(into) == []


def elsewhere(x: Tensor, out: Tensor) -> Tensor:
    return into(x, out).clone()


def the_place_before(x: Tensor, out: Tensor, before: dict[torch.Size, Tensor] = {}) -> Tensor:  # noqa: B006
    into(x, before.get(x.shape, out))
    before[x.shape] = out
    return out


def one_past(x: Tensor, out: Tensor) -> Tensor:
    into(x, out)
    if out is not x:
        out.as_strided((1,), (1,), out.storage_offset() + (out.numel() if out.is_contiguous() else 1)).zero_()
    return out


def its_operand(x: Tensor, out: Tensor) -> Tensor:
    into(x, out)
    if out is not x:
        x.zero_()
    return out


def what_overlaps(x: Tensor, out: Tensor) -> Tensor:
    return out.copy_(x.clone())


@pytest.mark.parametrize("fault", [elsewhere, the_place_before, one_past, its_operand])
def test_a_fault_is_found_in_each_place_where_it_is(fault: Callable[..., Tensor]) -> None:
    named = {text.partition(": ")[0] for text in wrong(fault)}
    assert set(comm_places.BESIDE) <= named


def test_a_place_that_overlaps_an_operand_has_to_be_refused() -> None:
    assert wrong(what_overlaps) == [f"call {at}: a place that overlaps x was taken" for at in (99, 199)]
