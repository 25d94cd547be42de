"""Does a library take a call as we make it? Answered by reading its Python source, without importing it.

Of a file only the lines of one header are parsed, so that asking costs a millisecond or so where the file has
thousands of lines.
"""

from __future__ import annotations

import ast
import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.source import MOST_HOPS, file_of, imports, root_of, submodule

_LONGEST_HEADER = 400  # lines


@dataclass(frozen=True)
class Call:
    """A call that an adapter makes of a library.

    Attributes:
        target: ``"package.module:function"`` or ``"package.module:Class.method"``.
        positional: names of the parameters that are given by position, from the first on, `self` left out.
        keywords: those given by name.
    """

    target: str
    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True)
class Header:
    """The parameters of a function, as its source has them; `self` and `cls` are left out."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    required: frozenset[str]
    takes_more: bool
    takes_any_keyword: bool


def takes(call: Call, *, root: Path | None = None, remedy: str = "") -> Finding:
    """Look whether the function that a call names would take it.

    Args:
        call: the call.
        root: folder of the top-level package, where it is not the one that an import would find.
        remedy: what the user can do if it does not.

    Returns:
        Finding. Codes of a bad answer: ``package_missing``, ``package_broken``, ``symbol_missing``,
        ``symbol_unknown`` (compiled, or made at run time: no source to read) and ``signature_changed``.
    """
    module, _, name = call.target.partition(":")
    top, *rest = module.split(".")
    if root is None:
        root_or_finding = root_of(top, call.target, remedy)
        if isinstance(root_or_finding, Finding):
            return root_or_finding
        root = root_or_finding
    try:
        header = _header(root, rest, name.split("."), MOST_HOPS)
    except _Unknown as unknown:
        return lacking(call.target, unknown.code, str(unknown), remedy)
    except (OSError, SyntaxError, ValueError) as error:
        return lacking(call.target, "package_broken", f"the source of {module} cannot be read: {error}", remedy)
    wrong = mismatch(call, header)
    if wrong is not None:
        return lacking(call.target, "signature_changed", f"{module}.{name} {wrong}", remedy)
    return found(call.target, None, f"{module}.{name} takes the call")


def mismatch(call: Call, header: Header) -> str | None:
    """What of a call a function would not take, or take for something else."""
    for place, name in enumerate(call.positional):
        if place >= len(header.positional):
            if not header.takes_more:
                return f"takes {len(header.positional)} arguments by position, not {name} as number {place + 1}"
        elif header.positional[place] != name:
            return f"has {header.positional[place]} in place {place + 1}, where {name} was"
    known = {*header.positional, *header.keyword_only}
    for name in call.keywords:
        if name not in known and not header.takes_any_keyword:
            return f"has no parameter {name}"
    lacks = header.required - {*call.positional, *call.keywords}
    if lacks:
        return f"asks for {', '.join(sorted(lacks))}, which we do not give"
    return None


class _Unknown(Exception):
    """A name whose definition cannot be found in Python source."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def _header(root: Path, rest: list[str], path: list[str], hops: int) -> Header:
    """Parameters of the function or method `path`, looked for in the module `rest` and where it is imported from."""
    where = ".".join([root.stem, *rest])
    if hops == 0:
        raise _Unknown("symbol_unknown", f"{where} passes {path[0]} on too often to follow")
    source = file_of(root, rest)
    if source is None:
        raise _Unknown("symbol_unknown", f"{where} has no Python source to read")
    text = source.read_text(encoding="utf-8")
    lines = text.splitlines()
    function = path[-1]
    start, indent = 0, ""
    if len(path) == 2:
        owner = re.compile(rf"^class {re.escape(path[0])}\b")
        start = next((number for number, line in enumerate(lines) if owner.match(line)), -1) + 1
        body = next((line for line in lines[start:] if line.strip() and line[0].isspace()), "")
        indent = body[: len(body) - len(body.lstrip())]
    definition = re.compile(rf"^{indent}(?:async )?def {re.escape(function)}\s*[(\[]")
    made = re.compile(rf"^{re.escape(function)}(?:: [^=]+)? = (\w+)$")
    if len(path) == 1 or start:
        header = None
        for number in range(start, len(lines)):
            line = lines[number]
            if len(path) == 2 and re.match(r"^[A-Za-z@]", line):  # the class has ended
                break
            if definition.match(line):
                header = _parsed(lines[number : number + _LONGEST_HEADER])  # the last of several counts, as in Python
            elif len(path) == 1 and (alias := made.match(line)) and alias[1] != "None":
                return _header(root, rest, [alias[1]], hops - 1)
        if header is not None:
            return header
        if len(path) == 2:
            raise _Unknown("symbol_missing", f"{where} defines {path[0]} without {function}")
    for module, original in imports(text, path[0]):
        below = submodule(root, rest, source, module)
        if below is not None:
            return _header(root, below, [original, *path[1:]], hops - 1)
    for module, _ in imports(text, "*"):
        below = submodule(root, rest, source, module)
        with contextlib.suppress(_Unknown):  # one of several may have it
            if below is not None:
                return _header(root, below, path, hops - 1)
    raise _Unknown("symbol_missing", f"{where} does not define {path[0]}")


def _parsed(lines: list[str]) -> Header:
    """The header of a function, whose source begins at the first of the lines."""
    text = ""
    for line in lines:
        text += line.strip() + "\n"
        for body in ("", " pass") if ":" in line else ():  # the header's last line, perhaps with a body
            try:
                node = ast.parse(text + body).body[0]
            except SyntaxError:
                continue
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return _of(node.args)
    raise SyntaxError(f"no end of the header {lines[0].strip()!r}")


def _of(arguments: ast.arguments) -> Header:
    plain = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = set(plain[: len(plain) - len(arguments.defaults)])
    named = [argument.arg for argument in arguments.kwonlyargs]
    required |= {name for name, default in zip(named, arguments.kw_defaults, strict=True) if default is None}
    own = plain[:1] if plain[:1] in (["self"], ["cls"]) else []
    return Header(
        tuple(plain[len(own) :]),
        tuple(named),
        frozenset(required - set(own)),
        arguments.vararg is not None,
        arguments.kwarg is not None,
    )
