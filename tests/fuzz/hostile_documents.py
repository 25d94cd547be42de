"""Documents as an attacker, a full disk or another version would leave them, generated from a seed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

Plain = Any

# Texts of values, since some of them no JSON writer writes.
_VALUES = (
    "null", "true", "false", "0", "-1", "1e999", "-1e999", "1e-999", "NaN", "Infinity", "-Infinity",
    "9" * 400, "9" * 5000,
    "18446744073709551616", "0.1", '""', '"x"', '"\\u0000"', '"\\ud800"', '"../../../etc/passwd"', '"/dev/zero"',
    '"a\\nkernelhub: forged"', '"\\u001b[2J"', '"' + "y" * 20000 + '"', "[]", "[null]",
    "{}", '{"": 0}', '{"a": {"a": {}}}',
    "[" * 40 + "]" * 40, "[" * 5000 + "]" * 5000, '{"a":' * 3000 + "0" + "}" * 3000,
)  # fmt: skip
_WHOLE = (
    b"", b" ", b"\0" * 64, b"%" * 999, b"a = [" + b"[" * 3000,
    b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"{", b"[", b"[" * 200000, b'{"a":' * 100000,
    b"nul",    b"'", b"{'a': 1}", b'{"a": 1,}', b"{}{}", b"\xc3(", b'"\xed\xa0\x80"', b"//", b"<html>",
)  # fmt: skip


def mutants(random: Random, document: Plain, count: int) -> Iterator[bytes]:
    """So many broken relatives of a good document, all different in kind, in an order that the seed decides."""
    good = json.dumps(document).encode()
    for number in range(count):
        if number < len(_WHOLE):
            yield _WHOLE[number]
        elif random.random() < 0.7:
            yield _with_a_wrong_part(random, document)
        else:
            yield _damaged(random, good)


def parts(random: Random, document: Plain, count: int) -> Iterator[Plain]:
    """So many relatives of which a part is wrong, as far as JSON of ours can hold them at all."""
    made = 0
    while made < count:
        try:
            one = json.loads(_with_a_wrong_part(random, document))
            json.dumps(one, allow_nan=False)
            yield one
        except (ValueError, RecursionError):
            continue
        made += 1


def _with_a_wrong_part(random: Random, document: Plain) -> bytes:
    """One value, somewhere, is another; or a key is gone, or twice there."""
    marker = "kernelhub fuzz marker"
    copy = json.loads(json.dumps(document))
    holder, key = random.choice(list(_places(copy)))
    how = random.random()
    if how < 0.15 and isinstance(holder, dict):
        del holder[key]
        return json.dumps(copy).encode()
    kept, holder[key] = holder[key], marker
    text = json.dumps(copy)
    value = random.choice(_VALUES)
    if how < 0.25 and isinstance(holder, dict):
        value = f"{json.dumps(kept)}, {json.dumps(key)}: {value}"
    return text.replace(json.dumps(marker), value, 1).encode()


def _places(value: Plain) -> Iterator[tuple[Any, Any]]:
    """Every key and index of a document, with what holds it."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _damaged(random: Random, good: bytes) -> bytes:
    """Cut, doubled, or with other bytes in it."""
    data = bytearray(good)
    at = random.randrange(len(data))
    how = random.randrange(4)
    if how == 0:
        return bytes(data[:at])
    if how == 1:
        return bytes(data[:at] + data)
    for _ in range(random.randrange(1, 9)):
        data[random.randrange(len(data))] = random.randrange(256)
    return bytes(data)
