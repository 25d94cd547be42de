"""An op that lets the launcher make whole calls gives it every argument, in order, before it looks at any."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest

from kernelhub.ops import functions

REPEATED = [function for function in functions() if ".again(" in inspect.getsource(function)]


def test_ops_repeat_whole_calls() -> None:
    assert len(REPEATED) >= 25


@pytest.mark.parametrize("function", REPEATED, ids=lambda function: function.__name__)
def test_all_arguments_are_given_first(function: Any) -> None:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    body = tree.body[1:]
    traced = body.pop(0) if ".traced(" in ast.unparse(body[0]) else None
    assert traced is None or (isinstance(traced, ast.If) and isinstance(traced.body[-1], ast.Return))
    first = body[0]
    # `locals()` would have what the launcher returned as an argument.
    assert not any("traced(**locals())" in ast.unparse(statement) for statement in body)
    asked = [node for node in ast.walk(first) if isinstance(node, ast.Call)]
    assert [ast.unparse(call.func).rpartition(".")[2] for call in asked] == ["again"]
    assert [ast.unparse(one) for one in asked[0].args] == list(inspect.signature(function).parameters)
