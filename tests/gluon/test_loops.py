"""Loops that Gluon compiles wrongly: no kernel has one.

Triton 3.6 and 3.7 take a number that an outer loop carries for what it was at first, if it is a bound of an inner loop:

    for g in range(groups):
        for tile in range(t, end):   # t of the first group, in every group
            ...
        t = end

The emulator runs the Python text, and is right. Compute such a bound within the outer loop.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kernelhub.backends.gluon as backend

FILES = sorted(Path(backend.__file__).parent.rglob("*.py"))


def assigned(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that are assigned below a node, and in which line."""
    for item in ast.walk(node):
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            yield item.id, item.lineno


def carried_bounds(tree: ast.AST) -> list[str]:
    """Bounds of inner loops that an outer loop carries."""
    found = []
    for outer in ast.walk(tree):
        if not isinstance(outer, (ast.For, ast.While)):
            continue
        made = [pair for statement in outer.body for pair in assigned(statement)]
        if isinstance(outer, ast.For):
            made += assigned(outer.target)
        for inner in ast.walk(outer):
            if inner is outer or not isinstance(inner, ast.For) or not isinstance(inner.iter, ast.Call):
                continue
            for bound in inner.iter.args:
                lines = [line for name, line in made if isinstance(bound, ast.Name) and name == bound.id]
                if lines and min(lines) >= inner.lineno:
                    found.append(f"{ast.unparse(inner.iter)} in line {inner.lineno}")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FILES[0].parent)))
def test_no_inner_loop_begins_or_ends_where_an_outer_one_carries(file: Path) -> None:
    assert carried_bounds(ast.parse(file.read_text())) == []


def test_the_form_is_found() -> None:
    loop = "for g in range(n):\n    end = f(g)\n    for tile in range(t, end, n):\n        pass\n    t = end\n"
    assert carried_bounds(ast.parse(loop)) == ["range(t, end, n) in line 3"]
    assert carried_bounds(ast.parse(loop.replace("range(t,", "range(first(t),"))) == []
