"""The package's files, parsed once for all laws that are read off them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import kernelhub

ROOT = Path(kernelhub.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# The laws run in one worker, which parses each file once.
together = pytest.mark.xdist_group("laws")


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A file of the package; do not change it."""
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, parents first."""
    return tuple(ast.walk(parsed(path)))
