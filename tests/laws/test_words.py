"""Docstrings and string constants use plain technical English: none of the words below.

Comments are not read. Neither are docstrings inside of jitted kernels: they are part of the source that Triton hashes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.laws.sources import parsed, together

pytestmark = together
PACKAGE = Path(__file__).parents[2] / "kernelhub"
ROOMS = ("backends", "cli", "compat", "dispatch", "evidence", "ops", "probes", "runtime", "warming")

# Word or phrase, as a regular expression -> what to write instead.
BANNED = {
    r"mend(s|ed|ing)?": "fix, correct",
    r"tells?|told": "report, log, state, determine, distinguish",
    r"verdicts?": "selection",
    r"lineups?": "ranking, candidates",
    r"wish(es|ed)?": "preference, request",
    r"whoever": "name the subject",
    r"bears?|bearing": "tolerate, carry",
    r"(hold|holds|held) (\w+ )?against": "compare with, check against",
    r"asks? for|asked for": "require, request, opt-in",
    r"for want of": "without",
    r"falls? to": "fallback",
    r"(un)?able": "supported, unsupported",
    r"knows?": "has, supports",
    r"wants": "requires, needs",
    r"(by|of|for) who": "name the subject",
    r"stands? (in|for|at|behind|there|with)": "is in, means",
    r"lies?": "is, is in",
}
_PATTERN = re.compile(rf"\b(?:{'|'.join(f'(?:{words})' for words in BANNED)})\b", re.IGNORECASE)


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each string constant outside of jitted kernels."""
    nodes: list[ast.AST] = [parsed(path)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(item) for item in node.decorator_list):
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        nodes += ast.iter_child_nodes(node)


@pytest.mark.parametrize("room", ROOMS)
def test_strings_of_a_room_use_none_of_the_banned_words(room: str) -> None:
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {match.group()!r} in {' '.join(text.split())[:80]!r}"
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for line, text in strings(path)
        for match in _PATTERN.finditer(text)
    ]
    assert not found, "\n".join(found)
