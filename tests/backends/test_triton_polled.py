"""The PTX of a thread that waits for its elements of a row, statement by statement: no interpreter runs it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from kernelhub.backends.triton.comm import polled

ALL = 0xFFFFFFFF
Memory = Callable[[int], list[int]]


def run(text: str, operands: dict[str, int], memory: Memory) -> tuple[dict[str, int], int]:
    """The operands after the program, and how often it has read. `memory` gives the words at an address."""
    values: dict[str, int] = dict(operands)
    statements = [
        one.strip() for one in re.split(r"[;\n]", text.strip("{}\n").replace("READ:", "READ;")) if one.strip()
    ]
    reads, at = 0, 0
    while at < len(statements):
        statement = statements[at]
        at += 1
        if statement.startswith(".reg") or statement == "READ":
            continue
        if statement.startswith("@"):
            guard, statement = statement[1:].split(" ", 1)
            if not values[guard]:
                continue
        name, rest = statement.split(" ", 1)
        if name == "bra":
            at = statements.index("READ")
            continue
        places = [place.strip() for place in re.sub(r"[{}\[\]]", "", rest).split(",")]
        if name == "ld.volatile.global.v4.b32":
            reads += 1
            values.update(zip(places[:4], memory(values[places[4]]), strict=True))
            continue
        target, *sources = places
        given = [values[one] if one in values else int(one, 0) for one in sources]
        values[target] = OPERATIONS[name](*given)
    return values, reads


OPERATIONS: dict[str, Any] = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "sub.u32": lambda a, b: (a - b) & ALL,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "max.u32": max,
    "setp.ne.b32": lambda a, b: a != b,
    "setp.ne.u32": lambda a, b: a != b,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.ne.and.u32": lambda a, b, c: (a != b) and c,
}


def lacks(word: int, item_bytes: int) -> bool:
    """Whether one of the elements of a word is empty."""
    parts = (word & 0xFFFF, word >> 16) if item_bytes == 2 else (word,)
    return any(part == (0xFFFF if item_bytes == 2 else ALL) for part in parts)


def drawn(chosen: random.Random) -> int:
    """A word whose halves are often almost those of an empty slot."""
    halves = [chosen.choice((0xFFFF, 0xFFFE, 0x7FFF, 0x8000, 0, 1, chosen.getrandbits(16))) for _ in range(2)]
    return halves[0] | halves[1] << 16


@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("units", [1, 2, 4])
def test_a_thread_reads_until_none_of_its_elements_is_empty(units: int, item_bytes: int) -> None:
    chosen = random.Random(units * item_bytes)
    for _ in range(200):
        masks = [chosen.choice((0, 1, 1, 1)) for _ in range(units)]
        # What each unit holds at each read: at last nothing is empty.
        history = [[[drawn(chosen) for _ in range(4)] for _ in range(5)] for _ in range(units)]
        for unit in history:
            unit.append([word if not lacks(word, item_bytes) else 0x7FFF7FFF for word in unit[-1]])
        count = [0] * units

        def memory(address: int, count: list[int] = count, history: Any = history) -> list[int]:
            count[address] += 1
            return list(history[address][min(count[address], 6) - 1])

        operands = {f"${4 * units + unit}": unit for unit in range(units)}
        operands |= {f"${5 * units + unit}": mask for unit, mask in enumerate(masks)}
        found, _ = run(polled.code(units, item_bytes), operands, memory)
        took = next(
            (
                turn
                for turn in range(6)
                if not any(
                    mask and any(lacks(w, item_bytes) for w in history[unit][turn]) for unit, mask in enumerate(masks)
                )
            ),
            5,
        )
        assert count == [(took + 1) * mask for mask in masks]
        for unit, mask in enumerate(masks):
            words = [found[f"${word * units + unit}"] for word in range(4)]
            assert words == (history[unit][took] if mask else [0] * 4)


def test_a_thread_gives_up_after_some_reads() -> None:
    _, reads = run(polled.code(1, 2), {"$4": 0, "$5": 1}, lambda _: [ALL] * 4)
    assert reads == polled._READS


def test_each_operand_has_a_constraint() -> None:
    for units in (1, 2, 8):
        operands = {int(place) for place in re.findall(r"\$(\d+)", polled.code(units, 2))}
        assert operands == set(range(len(polled.constraints(units).split(","))))
