"""What a type checker of a user's sees of the package, installed as the README installs it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_editable_install_is_a_folder_on_the_path() -> None:
    """setuptools writes a finder of imports, which type checkers do not follow, unless the folder is named."""
    assert 'package-dir = { "" = "." }' in (ROOT / "pyproject.toml").read_text()


def test_a_misspelt_name_is_flagged() -> None:
    """A checker that sees a module's `__getattr__` takes every name, e.g. ``kernelhub.attentoin``."""
    tree = ast.parse((ROOT / "kernelhub" / "__init__.py").read_text())
    hidden = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "not TYPE_CHECKING"]
    assert "__getattr__" not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert "__getattr__" in {part.name for node in hidden for part in node.body if isinstance(part, ast.FunctionDef)}
