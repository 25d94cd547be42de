"""Whether a library accepts a call as an adapter makes it, by its Python source; the library is not imported.

Only the lines of one function header are parsed: about a millisecond, also in a file of thousands of lines.
"""

from __future__ import annotations

import ast
import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.source import MOST_HOPS, Sources, file_of, imports, root_of, submodule

_LONGEST_HEADER = 1 << 15  # characters
_MOST_ENDS = 200  # lines that may be its last


@dataclass(frozen=True)
class Call:
    """A call that an adapter makes to a library.

    Attributes:
        target: ``"package.module:function"`` or ``"package.module:Class.method"``.
        positional: names of the parameters that are passed by position, from the first, without `self`.
        keywords: those passed by name.
    """

    target: str
    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True)
class Header:
    """The parameters of a function, as its source has them, without `self` and `cls`."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    required: frozenset[str]
    takes_more: bool
    takes_any_keyword: bool


def takes(call: Call, *, root: Path | None = None, remedy: str = "") -> Finding:
    """Check whether the function that a call names accepts the call.

    Args:
        call: the call.
        root: folder of the top-level package, if not the one that an import would find.
        remedy: what the user can do if it does not accept the call.

    Returns:
        Finding. Codes of a negative finding: ``package_missing``, ``package_broken``, ``symbol_missing``,
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
        header = _header(Sources(), root, rest, name.split("."), MOST_HOPS)
    except _Unknown as unknown:
        return lacking(call.target, unknown.code, str(unknown), remedy)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return lacking(call.target, "package_broken", f"the source of {module} cannot be read: {error}", remedy)
    wrong = mismatch(call, header)
    if wrong is not None:
        return lacking(call.target, "signature_changed", f"{module}.{name} {wrong}", remedy)
    return found(call.target, None, f"{module}.{name} supports the call")


def mismatch(call: Call, header: Header) -> str | None:
    """Why a function would reject a call or misread an argument; empty if it accepts the call."""
    for place, name in enumerate(call.positional):
        if place >= len(header.positional):
            if not header.takes_more:
                return f"takes {len(header.positional)} arguments by position, not {name} as number {place + 1}"
        elif header.positional[place] != name:
            return f"has {header.positional[place]} as argument {place + 1}, where {name} was"
    known = {*header.positional, *header.keyword_only}
    for name in call.keywords:
        if name not in known and not header.takes_any_keyword:
            return f"has no parameter {name}"
    lacks = header.required - {*call.positional, *call.keywords}
    if lacks:
        return f"requires {', '.join(sorted(lacks))}, which the adapter does not pass"
    return None


class _Unknown(Exception):
    """A name whose definition cannot be found in Python source."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def _header(sources: Sources, root: Path, rest: list[str], path: list[str], hops: int) -> Header:
    """Parameters of the function or method `path`, looked for in the module `rest` and where it is imported from."""
    where = ".".join([root.stem, *rest])
    if hops == 0:
        raise _Unknown("symbol_unknown", f"{where} re-exports {path[0]} through too many modules to follow")
    if not sources.first(*rest, *path, str(hops)):
        raise _Unknown("symbol_missing", f"{where} does not define {path[0]}")
    source = file_of(root, rest)
    if source is None:
        raise _Unknown("symbol_unknown", f"{where} has no Python source to read")
    text = sources.text(source)
    if len(path) == 1:
        begins = None
        word = re.escape(path[0])
        named = rf"^(?:(?:async )?def {word}[ \t]*[(\[]|{word}(?:: [^=\n]+)? = (\w+)$)"
        for match in re.finditer(named, text, re.MULTILINE):
            if match[1] is None:
                begins = match.start()  # the last definition counts, as in Python
            elif match[1] != "None":
                return _header(sources, root, rest, [match[1]], hops - 1)
        if begins is not None:
            return _parsed(text, begins)
    elif (owner := re.search(rf"^class {re.escape(path[0])}\b.*\n", text, re.MULTILINE)) is not None:
        after = re.compile(r"^[A-Za-z@]", re.MULTILINE).search(text, owner.end())
        end = after.start() if after is not None else len(text)
        first = re.compile(r"^[ \t]+(?=\S)", re.MULTILINE).search(text, owner.end(), end)
        named = rf"^{first[0] if first is not None else ''}(?:async )?def {re.escape(path[-1])}[ \t]*[(\[]"
        methods = [match.start() for match in re.compile(named, re.MULTILINE).finditer(text, owner.end(), end)]
        if methods:
            return _parsed(text, methods[-1])
        raise _Unknown("symbol_missing", f"{where} defines {path[0]} without {path[-1]}")
    for module, original in imports(text, path[0]):
        below = submodule(root, rest, source, module)
        if below is not None:
            return _header(sources, root, below, [original, *path[1:]], hops - 1)
    for module, _ in imports(text, "*"):
        below = submodule(root, rest, source, module)
        with contextlib.suppress(_Unknown):  # one of several may have it
            if below is not None:
                return _header(sources, root, below, path, hops - 1)
    raise _Unknown("symbol_missing", f"{where} does not define {path[0]}")


def _parsed(text: str, begins: int) -> Header:
    """The header of a function that begins at an offset of a text."""
    lines = text[begins : begins + _LONGEST_HEADER].splitlines()
    header, tries = "", 0
    for line in lines:
        header += line.strip() + "\n"
        if ":" not in line or ")" not in header:
            continue
        tries += 1
        if tries > _MOST_ENDS:
            break
        for body in ("", " pass"):  # the header's last line, perhaps with a body
            try:
                node = ast.parse(header + body).body[0]
            except SyntaxError:
                continue
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return _of(node.args)
    raise SyntaxError(f"no end of the header {lines[0].strip()[:200]!r}")


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
