"""Does a module define a name? Answered by reading its source, without importing it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from kernelhub.probes.finding import Finding, found, lacking


def symbol(module: str, name: str, *, remedy: str = "") -> Finding:
    """Look for a top-level definition of `name` in `module`, e.g. ``symbol("pkg.sub", "run")``.

    Only Python sources can be read: a compiled module gives ``symbol_unknown``, which is not ok.
    """
    subject = f"{module}:{name}"
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except Exception as error:
        return lacking(subject, "package_broken", f"looking for {top} failed: {error!r}", remedy)
    if spec is None or spec.origin is None:
        return lacking(subject, "package_missing", f"{top} is not installed", remedy)
    source = _source_of(Path(spec.origin), rest)
    if source is None:
        return lacking(subject, "symbol_unknown", f"{module} has no Python source to read", remedy)
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        return lacking(subject, "package_broken", f"{source} cannot be read: {error}", remedy)
    if name in _defined_names(tree):
        return found(subject, name, f"{module} defines {name}")
    return lacking(subject, "symbol_missing", f"{module} does not define {name}", remedy)


def _source_of(origin: Path, rest: list[str]) -> Path | None:
    """File of the submodule `rest` below the package whose __init__ is `origin`."""
    if not rest:
        return origin if origin.suffix == ".py" else None
    base = origin.parent.joinpath(*rest)
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _defined_names(tree: ast.Module) -> set[str]:
    """Names bound at module level, also inside if, try and with."""
    names: set[str] = set()
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        else:
            pending += [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
    return names
