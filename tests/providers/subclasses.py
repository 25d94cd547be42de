"""Do our subclasses of a library's classes have its methods? Read from both sources; nothing is imported."""

from __future__ import annotations

import ast
from pathlib import Path


def differences(ours: Path, theirs: Path, *shared: Path) -> list[str]:
    """What of our classes is not as in the base classes of the same names' modules.

    A public method has to be one of the base's with its parameters in their order, ours may have more after them, and
    every abstract method has to be there. Constructors may differ. `shared` have further base classes of ours.
    """
    above = _classes(theirs)
    mixed_in = {name: node for path in shared for name, node in _classes(path).items()}
    found = []
    for name, node in _classes(ours).items():
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        mine = {}
        for own in (*(mixed_in[base] for base in bases if base in mixed_in), node):
            mine |= _members(own)
        for base in [base for base in bases if base in above]:
            members = _inherited(above, base)
            found += [f"{name} has no {member}" for member in _abstract(above[base]) if member not in mine]
            for member, parameters in mine.items():
                if member.startswith("_"):
                    continue
                if member not in members:
                    found.append(f"{base} has no {member}, which {name} has")
                elif parameters[: len(members[member])] != members[member]:
                    found.append(f"{name}.{member} takes {parameters}, {base}.{member} {members[member]}")
    return found


def _classes(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}


def _members(node: ast.ClassDef) -> dict[str, list[str]]:
    """Methods with their parameters, and values without any."""
    members: dict[str, list[str]] = {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            members[item.name] = [argument.arg for argument in (*item.args.args, *item.args.kwonlyargs)]
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            members[item.target.id] = []
        elif isinstance(item, ast.Assign):
            members |= {target.id: [] for target in item.targets if isinstance(target, ast.Name)}
    return members


def _inherited(classes: dict[str, ast.ClassDef], name: str) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    for base in classes[name].bases:
        generic = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(generic, ast.Name) and generic.id in classes:
            members |= _inherited(classes, generic.id)
    return members | _members(classes[name])


def _abstract(node: ast.ClassDef) -> list[str]:
    return [
        item.name
        for item in node.body
        if isinstance(item, ast.FunctionDef) and any("abstract" in ast.unparse(mark) for mark in item.decorator_list)
    ]
