"""Validated JSON input with a bounded size.

Every JSON document that kernelhub trusts is read here: manifests, evidence, measured tables, lock files, a model's
configuration. A document is refused, with one code, if its file is not a regular file, is too large or is not UTF-8; if
it nests too deeply; if a number in it is not finite; or if it does not match its `schema`. The result is the document
or a `DocumentError`.

>>> parsed(b'{"date": "2026-11-20", "checks": []}', {"date": str, "checks": [str], "note?": str})
{'date': '2026-11-20', 'checks': []}
>>> parsed(b'{"date": 1e999}', {"date": str})
Traceback (most recent call last):
kernelhub.probes.document.DocumentError: is not JSON: 1e999 is not a finite number
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

CODE = "document_refused"
MOST_BYTES = 16 << 20  # the longest of ours, all measurements of an op on one device, take less than one
_MOST_DEPTH = 32
_MOST_BITS = 64
_AT_ONCE = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)

# A type or None; a tuple of schemas, one of which must do; {"name": schema, "name that may be left out?": schema};
# {str: schema}; [schema]; or Any.
Schema = Any
SCALAR = (None, bool, int, float, str)


class DocumentError(ValueError):
    """An invalid document; the text says why.

    Attributes:
        code: ``"document_refused"``.
    """

    code = CODE


def read(path: Path, schema: Schema = Any, most_bytes: int = MOST_BYTES, *, finite: bool = True) -> Any:
    """The document in a regular file.

    Args:
        path: of the file.
        schema: the form that it must have.
        most_bytes: size limit.
        finite: whether numbers must be finite; third-party documents may hold Infinity.

    Raises:
        DocumentError: it is not a document, or does not match `schema`.
        OSError: it does not exist, or cannot be read.
    """
    return parsed(contents(path, most_bytes), schema, most_bytes, finite=finite)


def text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The UTF-8 text of a regular file, in any format.

    Raises:
        DocumentError, OSError: as of `read`.
    """
    return _decoded(contents(path, most_bytes))


def contents(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file.

    Raises:
        DocumentError, OSError: as of `read`.
    """
    try:
        descriptor = os.open(path, _AT_ONCE)  # does not block: opening a pipe would wait for a writer
    except ValueError as error:  # a zero byte in its name
        raise DocumentError(f"cannot be opened: {error}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DocumentError("is not a regular file")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            raw = file.read(most_bytes + 1)
    finally:
        os.close(descriptor)
    _check_size(raw, most_bytes)
    return raw


def parsed(raw: bytes, schema: Schema = Any, most_bytes: int = MOST_BYTES, *, finite: bool = True) -> Any:
    """The document that bytes encode.

    Raises:
        DocumentError: as of `read`.
    """
    _check_size(raw, most_bytes)
    try:
        hooks: dict[str, Any] = {"parse_constant": _refuse, "parse_float": _finite} if finite else {}
        document = json.loads(_decoded(raw), **hooks)
    except (ValueError, RecursionError, MemoryError) as error:
        raise DocumentError(f"is not JSON: {error}") from None
    _check_depth(document)
    wrong = difference(document, schema)
    if wrong:
        raise DocumentError(f"is not as kernelhub writes it: {wrong}")
    return document


def difference(value: Any, schema: Schema, where: str = "it") -> str:
    """How a value differs from a schema, as a sentence; empty if it matches."""
    if schema is Any:
        return ""
    if isinstance(schema, list):
        return _first(value, list, where, lambda: ((item, schema[0], f"{where}[{i}]") for i, item in enumerate(value)))
    if isinstance(schema, dict):
        if str in schema:
            return _first(
                value, dict, where, lambda: ((item, schema[str], _below(where, name)) for name, item in value.items())
            )
        if not isinstance(value, dict):
            return _not_a(value, dict, where)
        for name, part in schema.items():
            key = name.removesuffix("?")
            if key not in value and key == name:
                return f"{where} has no {key!r}"
            if key in value and (wrong := difference(value[key], part, _below(where, key))):
                return wrong
        return ""
    if isinstance(schema, tuple):
        found = [difference(value, kind, where) for kind in schema]
        return "" if "" in found else found[-1]
    kind = type(None) if schema is None else schema
    if type(value) is kind or (kind is float and type(value) is int):
        return ""
    return _not_a(value, kind, where)


def _first(value: Any, kind: type, where: str, parts: Any) -> str:
    if not isinstance(value, kind):
        return _not_a(value, kind, where)
    return next((wrong for item, part, below in parts() if (wrong := difference(item, part, below))), "")


def _not_a(value: Any, kind: type, where: str) -> str:
    return f"{where} is {shown(value)}, not {_WORDS[kind]}"


def _below(where: str, name: str) -> str:
    return f"{where}.{name[:60]}"


def shown(value: Any) -> str:
    """A value as a message shows it: short, and on one line."""
    words = (
        "null"
        if value is None
        else repr(value)
        if isinstance(value, (str, int, float, bool, type(None)))
        else _WORDS[type(value)]
    )
    return words if len(words) <= 60 else f"{words[:57]}..."


_WORDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _check_size(raw: bytes, most_bytes: int) -> None:
    if len(raw) > most_bytes:
        raise DocumentError(f"has more than {most_bytes} bytes")


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DocumentError(f"is not UTF-8: byte {raw[error.start]:#04x} at {error.start}") from None


def _check_depth(document: Any) -> None:
    """Check nesting depth, the length of integers, and that all text is valid Unicode."""
    level, depth = [document], 0
    while level:
        depth += 1
        if depth > _MOST_DEPTH:
            raise DocumentError(f"nests deeper than {_MOST_DEPTH} levels")
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is dict:
                below.extend(value)
                below.extend(value.values())
            elif kind is list:
                below.extend(value)
            elif kind is int and value.bit_length() > _MOST_BITS:
                raise DocumentError("holds an integer with too many digits")
            elif kind is str and not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    raise DocumentError("holds an unpaired surrogate") from None
        level = below


def _refuse(word: str) -> float:
    raise DocumentError(f"{word} is not a number")


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise DocumentError(f"{word[:60]} is not a finite number")
    return number
