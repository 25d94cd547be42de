"""Does a library define a name? Answered by reading its Python source, without importing it.

Unlike `probes.signature` it finds classes and values too, and a submodule counts as a name of its package. A name that
stands under a condition counts as defined: what the condition asks for has to be asked apart.
"""

from __future__ import annotations

import re
from pathlib import Path

from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.source import MOST_HOPS, Sources, file_of, imports, root_of, submodule


def defines(target: str, *, root: Path | None = None, remedy: str = "") -> Finding:
    """Look whether a module has a name.

    Args:
        target: ``"package.module:name"``, ``"package.module:Class.member"``, or ``"package.module"`` for the module
            itself.
        root: folder of the top-level package, where it is not the one that an import would find.
        remedy: what the user can do if it has not.

    Returns:
        Finding. Codes of a bad answer: ``package_missing``, ``package_broken``, ``symbol_missing``.
    """
    module, _, name = target.partition(":")
    top, *rest = module.split(".")
    if root is None:
        root_or_finding = root_of(top, target, remedy)
        if isinstance(root_or_finding, Finding):
            return root_or_finding
        root = root_or_finding
    try:
        there = file_of(root, rest) is not None and (not name or _defined(Sources(), root, rest, name, MOST_HOPS))
    except (OSError, ValueError, RecursionError) as error:
        return lacking(target, "package_broken", f"the source of {module} cannot be read: {error}", remedy)
    if not there:
        what = f"{module} does not define {name}" if name else f"{top} has no module {module}"
        return lacking(target, "symbol_missing", what, remedy)
    return found(target, None, f"{module} defines {name}" if name else f"{top} has {module}")


def _defined(sources: Sources, root: Path, rest: list[str], name: str, hops: int) -> bool:
    """Whether the module `rest` of a package defines the name, or imports it from where it is defined."""
    source = file_of(root, rest) if hops and sources.first(*rest, name, str(hops)) else None
    if source is None:
        return False
    text = sources.text(source)
    name, _, member = name.partition(".")
    here = (
        rf"^(?:(?:async )?def {re.escape(name)}\b|class {re.escape(name)}\b|{re.escape(name)}[ \t]*(?::[^=\n]+)?=[^=])"
    )
    definition = re.search(here, text, re.MULTILINE)
    if definition is not None:
        return not member or _has_member(text[definition.end() :], member)
    for wanted in (name, "*"):
        for module, original in imports(text, wanted):
            below = submodule(root, rest, source, module)
            if below is None:
                if wanted == "*":
                    continue
                return True  # of another package: its import is that package's matter
            original = name if wanted == "*" else original
            whole = f"{original}.{member}" if member else original
            if _defined(sources, root, below, whole, hops - 1) or file_of(root, [*below, whole]) is not None:
                return True
    return not member and source.name == "__init__.py" and file_of(root, [*rest, name]) is not None


def _has_member(body: str, member: str) -> bool:
    """Whether a class, whose source begins after its name, has a method, field or value of that name."""
    end = re.search(r"^[^\s#)\]]", body.partition("\n")[2], re.MULTILINE)
    inside = body.partition("\n")[2][: end.start() if end else None]
    return re.search(rf"^[ \t]+(?:(?:async )?def )?{re.escape(member)}[ \t]*[:=(]", inside, re.MULTILINE) is not None
