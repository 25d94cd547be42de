"""One way to read what others may have written: JSON, of a bounded size, of the form that is expected, or refused.

Every JSON document that kernelhub believes comes through here: manifests, evidence, measured tables, lock files, a
model's configuration. A document is refused, with one code, if its file is no ordinary file, is larger than allowed,
or is not UTF-8; if it nests deeper than any document of ours; if a number in it is not finite; or if it has another
form than its `schema`. Nothing else comes out of here than the document or a `DocumentError`.

>>> parsed(b'{"date": "2026-11-20", "checks": []}', {"date": str, "checks": [str], "note?": str})
{'date': '2026-11-20', 'checks': []}
>>> parsed(b'{"date": 1e999}', {"date": str})
Traceback (most recent call last):
kernelhub.probes.document.DocumentError: is not JSON: 1e999 is no finite number
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
    """A document that is not as it has to be; the text says why.

    Attributes:
        code: ``"document_refused"``.
    """

    code = CODE


def read(path: Path, schema: Schema = Any, most_bytes: int = MOST_BYTES, *, finite: bool = True) -> Any:
    """The document in an ordinary file.

    Args:
        path: of the file.
        schema: the form that it must have.
        most_bytes: what is longer is refused.
        finite: whether numbers must be; documents of others may hold Infinity.

    Raises:
        DocumentError: it is no document, or not of the form of `schema`.
        OSError: it is not there, or cannot be read.
    """
    return parsed(contents(path, most_bytes), schema, most_bytes, finite=finite)


def text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of an ordinary file in UTF-8, of any format.

    Raises:
        DocumentError, OSError: as of `read`.
    """
    return _decoded(contents(path, most_bytes))


def contents(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The bytes of an ordinary file.

    Raises:
        DocumentError, OSError: as of `read`.
    """
    try:
        descriptor = os.open(path, _AT_ONCE)  # at once: a pipe would keep its reader waiting for ever
    except ValueError as error:  # a zero byte in its name
        raise DocumentError(f"cannot be opened: {error}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DocumentError("is no ordinary file")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            raw = file.read(most_bytes + 1)
    finally:
        os.close(descriptor)
    _check_size(raw, most_bytes)
    return raw


def parsed(raw: bytes, schema: Schema = Any, most_bytes: int = MOST_BYTES, *, finite: bool = True) -> Any:
    """The document that bytes are.

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
    """In what a value is not of the form of a schema, as a sentence; empty if it is."""
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
    """That it nests no deeper than what goes through it can, and holds no number or text that breaks a reader."""
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
                raise DocumentError("holds an integer of more digits than any of ours")
            elif kind is str and not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    raise DocumentError("holds half of a character") from None
        level = below


def _refuse(word: str) -> float:
    raise DocumentError(f"{word} is no number")


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise DocumentError(f"{word[:60]} is no finite number")
    return number
