"""Calls that show a problem class are of that class, and right kernels are found right with any values."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.checks import Subject
from kernelhub.evidence.serving import ServingCall
from kernelhub.ops.models.calls import calls_of, counts_of, need_of
from kernelhub.ops.models.problems import Need
from kernelhub.ops.moe.experts.inputs import moe_inputs

CPU = torch.device("cpu")
TOKENS = (1, 2, 5, 17, 65, 1025)
SOME = 8  # classes of an op whose calls are compared with the reference


@cache
def classes(op: str) -> tuple[Need, ...]:
    """The problem classes of the cases of an op."""
    function = HUB.function(op)
    needs = (need_of(op, function.explain(**case.make(CPU)).problem) for case in CASES[op].cases())
    return tuple({repr(need): need for need in needs}.values())


def of_another_class(op: str, needs: Any) -> list[str]:
    found = []
    for need in needs:
        want = need.problem(CPU)
        for call in calls_of(need, counts_of(need, TOKENS)[:2], CPU, context_len=64, filled=False):
            got = HUB.function(op).explain(**call.arguments).problem
            if got != want:
                found.append(f"{call.label}: {got}, not {want}")
    return found


def kernels_of(op: str, *backends: str) -> list[Kernel]:
    name = HUB.record(op).name  # which loads the records
    return [kernel for kernel in HUB.registry.candidates(name).kernels if kernel.backend in backends]


@pytest.mark.full
@pytest.mark.parametrize("op", CASES)
def test_calls_of_every_class_are_of_it(op: str) -> None:
    assert of_another_class(op, classes(op)) == []


@pytest.mark.full
@pytest.mark.parametrize("op", CASES)
def test_a_right_kernel_is_found_right_with_any_values(op: str) -> None:
    kernels = kernels_of(op, "torch", "cpp")
    draw, checked = random.Random(f"values of {op}"), 0
    for need in draw.sample(classes(op), min(SOME, len(classes(op)))):
        for kernel in kernels:
            call = ServingCall(
                need, draw.choice(counts_of(need, TOKENS)[:2]), 64, draw.randrange(1 << 30), repeats=True
            )
            found = Subject(HUB.function(op), kernel, CASES[op], CPU).check(call.case())
            if not isinstance(found, str):  # its record has limits
                assert found.ok, f"{kernel.name}, {call.label}, {found.problem}: {found.code}, {found.figures}"
                checked += 1
    assert checked or not kernels


# Each of these was found wrong, as one in a thousand is whose largest intermediates are rounded far.
@pytest.mark.parametrize(
    ("tokens", "seed"), [(2, 42919849), (2, 16615527), (2, 607497611), (5, 409415160), (5, 911305623)]
)
def test_roundings_that_move_whole_rows_are_not_called_wrong(tokens: int, seed: int) -> None:
    arguments = moe_inputs(tokens=5, hidden_size=64, intermediate_size=32, num_experts=6, top_k=2)
    need = need_of("fused_moe", kernelhub.fused_moe.explain(**arguments).problem)
    (kernel,) = kernels_of("fused_moe", "torch")
    found = Subject(HUB.function("fused_moe"), kernel, CASES["fused_moe"], CPU).check(
        ServingCall(need, tokens, 64, seed).case()
    )
    assert found.ok, found.figures
