"""Nothing follows what a user's process has set for all new tensors: `set_default_device`, `set_default_dtype`."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import pytest

from tests.laws.sources import FILES, ROOT, nodes, together

pytestmark = together
# What makes a tensor, or decides where one is made, from nothing; of the second their dtype is that of integers.
FLOATS = ("empty", "empty_strided", "zeros", "ones", "full", "linspace", "logspace", "eye", "rand", "randn", "tensor")
FLOATS = (*FLOATS, "as_tensor", "asarray", "scalar_tensor", "normal", "hann_window")
WHOLE = ("arange", "randint", "randperm", "tril_indices", "triu_indices", "Generator")


def forgotten(tree: Iterable[ast.AST]) -> list[str]:
    """Factory calls of torch that do not say where, or of what dtype, a tensor is."""
    found = []
    plain = {
        alias.asname or alias.name: alias.name
        for node in tree
        if isinstance(node, ast.ImportFrom) and node.module == "torch"
        for alias in node.names
    }
    for node in tree:
        if not isinstance(node, ast.Call):
            continue
        name = None
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            name = node.func.attr if node.func.value.id == "torch" else None
        elif isinstance(node.func, ast.Name):
            name = plain.get(node.func.id)
        if name not in (*FLOATS, *WHOLE):
            continue
        given = {keyword.arg for keyword in node.keywords}
        if None in given or "out" in given or (name == "Generator" and node.args):
            continue
        wanted = {"device"} if name in WHOLE else {"device", "dtype"}
        if wanted - given:
            found.append(f"line {node.lineno}: {ast.unparse(node)} names no {' and no '.join(sorted(wanted - given))}")
    return found


def test_every_new_tensor_says_where_it_is_and_of_what_dtype() -> None:
    wrong = {str(path.relative_to(ROOT)): forgotten(nodes(path)) for path in FILES}
    assert {path: lines for path, lines in wrong.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "torch.empty(3)",
        "torch.zeros(3, device=d)",
        "torch.arange(3)",
        "torch.Generator()",
        "from torch import ones\nones(2)",
    ],
)
def test_the_law_sees_what_is_forgotten(source: str) -> None:
    assert len(forgotten(list(ast.walk(ast.parse(source))))) == 1
