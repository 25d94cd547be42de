"""Uniform registers that a listing of machine code reads where a path has not written them.

ptxas of CUDA 12.8 did that to a prefill: it computed the descriptors of a tile's queries before the first of two loops,
which is skipped where it has no steps, and the second loop read them all the same. The PTX was right, and nothing else
showed it but wrong rows on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*([^;]*);")
_TARGET = re.compile(r"\.L_x_\d+")
_REGISTER = re.compile(r"(gdesc|desc)?\[UR(\d+)|\bUR(\d+)(\.64)?")
# What writes a uniform register, its first operand of that kind. All others only read them.
_WRITES = re.compile(r"U(?!TMA|SETMAXREG|CGABAR|BLKCP|ISETP|PLOP3|MEMBAR)|R2UR|S2UR|CS2UR|VOTEU|REDUX|ELECT|LDSU")
_ALL = (1 << 63) - 1  # UR63 is zero


@dataclass
class _Instruction:
    reads: int
    writes: int
    follows: list[int]
    text: str


def unwritten(listing: str) -> list[str]:
    """Reads, as text, of uniform registers that some path to them has not written.

    A predicated write counts as one: what reads it has the same predicate.
    """
    code = list(_code(listing))
    if not code:
        return []
    written = [_ALL] * len(code)  # on every path so far
    written[0] = 0
    reached = {0}
    left = [0]
    while left:
        at = left.pop()
        after = written[at] | code[at].writes
        for target in code[at].follows:
            kept = written[target] & after
            if kept != written[target] or target not in reached:
                written[target] = kept
                reached.add(target)
                left.append(target)
    return [one.text for at, one in enumerate(code) if at in reached and one.reads & ~written[at]]


def _code(listing: str) -> Iterator[_Instruction]:
    lines, labels = [], {}
    for line in listing.split("\n"):
        if label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif found := _INSTRUCTION.search(line):
            lines.append(found)
    # Where a jump through a register goes to is in a comment behind it.
    told = " ".join(re.findall(r"BRANCH_TARGETS([^*]*)\*", listing))
    for at, (predicate, name, operands) in enumerate(found.groups() for found in lines):
        reads, writes = _registers(name, operands)
        follows = [] if name.startswith(("EXIT", "RET", "BRX", "JMX")) and not predicate else [at + 1]
        if name.startswith(("BRX", "JMX")):
            follows += [labels[target] for target in _TARGET.findall(told)]
        elif name.startswith("BRA"):
            targets = [labels[target] for target in _TARGET.findall(operands)]
            always = not predicate and not re.match(r"\s*!?U?P\d", operands) and ".DIV" not in name
            follows = targets if always else [*targets, at + 1]
        yield _Instruction(reads, writes, [to for to in follows if to < len(lines)], f"{name} {operands.strip()}")


def _registers(name: str, operands: str) -> tuple[int, int]:
    """(those that are read, those that are written), a bit each."""
    reads = writes = 0
    writing = _WRITES.match(name) is not None
    pairs = re.search(r"\.64\b", name) is not None
    parts = operands.split(",")
    for at, part in enumerate(parts):
        for kind, in_brackets, plain, wide in _REGISTER.findall(part):
            first, count = int(in_brackets or plain), 1
            if kind == "gdesc":  # descriptors of both operands, the first of which may be in other registers
                whole = at < 2
                first, count = (first, 4) if whole else (first + 2, 2)
            elif kind == "desc" or wide or (plain and (pairs or (writing and not writes and ".WIDE" in name))):
                count = 2
            mask = ((1 << count) - 1 << first) & _ALL
            if writing and not writes and not in_brackets and at < 2:
                writes = mask
            else:
                reads |= mask
    return reads, writes
