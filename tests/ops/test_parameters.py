"""Operands that are `torch.nn.Parameter`: every op takes them where no gradient is asked for, as it takes tensors."""

from __future__ import annotations

import ast
import inspect
import random
from typing import Any

import pytest
import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.poison import copied
from kernelhub.ops import functions
from kernelhub.ops.comm.experts.cases import by_expert
from tests.conftest import DEVICE
from tests.fuzz.drawn import DRAWN
from tests.fuzz.operands import replaced, tensors_of


@pytest.mark.device
@pytest.mark.parametrize("op", sorted(DRAWN))
def test_a_call_with_parameters_gives_what_one_with_tensors_gives(op: str) -> None:
    function = HUB.function(op)
    for seed in range(3):
        arguments = DRAWN[op](random.Random(seed), torch.device(DEVICE))
        given = arguments
        for name, tensor in tensors_of(arguments).items():
            if tensor.is_floating_point() and name not in CASES[op].written:
                given = replaced(given, name, torch.nn.Parameter(tensor, requires_grad=False))
        with torch.no_grad():
            got, want = (function(**copied(call), **_zeros(op, arguments)) for call in (given, arguments))
        if op == "moe_dispatch":  # of which rows of no expert hold anything
            got, want = (tuple(by_expert(sent).values()) for sent in (got, want))
        results = [value if isinstance(value, tuple) else (value,) for value in (got, want)]
        for one, other in zip(*results, strict=True):
            if one is not None:
                assert torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def _zeros(op: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Destinations: what no result belongs in is left as it was."""
    made = CASES[op].destinations(arguments).items()
    return {name: torch.zeros(shape, dtype=dtype, device=DEVICE) for name, (shape, dtype) in made}


def test_what_is_handed_to_the_traced_form_are_the_parameters_alone() -> None:
    """`traced(**locals())` stands before any local name is bound."""
    seen = 0
    for function in functions():
        plain = inspect.unwrap(function.call if hasattr(function, "call") else function)
        source = inspect.getsource(inspect.getmodule(plain))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and "traced(**locals())" in ast.unparse(node):
                line = next(
                    one.lineno
                    for one in ast.walk(node)
                    if isinstance(one, ast.Call) and ast.unparse(one).endswith(".traced(**locals())")
                )
                bound = [
                    one.id
                    for one in ast.walk(node)
                    if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store) and one.lineno < line
                ]
                assert bound == [], (node.name, bound)
                seen += 1
    assert seen
