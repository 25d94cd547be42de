# mypy: ignore-errors
"""Groups of rows, whose lengths the device alone has: each partition of a program goes over them by itself.

Tiles are counted through all groups, and a program takes every tile whose number is its own modulo the programs. Within
a group tiles of rows come first (`gemm/order.py`), so that those that run at the same time share weights.
"""

from __future__ import annotations

from kernelhub.backends.gluon.language import gl, gluon


@gluon.jit
def group_at(lengths, g, before, total, MASKED: gl.constexpr):
    """Of group g: its first row, how many it has, and where the next begins. Lengths may be any numbers.

    MASKED: groups have `total` places each, and `lengths` says how many are used; else it says where they end.
    """
    length = gl.load(lengths + g)
    if MASKED:
        first = g * total
        size = gl.minimum(gl.maximum(length, 0), total)
        after = before
    else:
        first = gl.maximum(before, 0)
        after = gl.maximum(gl.minimum(length, total), before)
        size = after - before
    return first, size, after


@gluon.jit
def first_tile(begin):
    """The first tile of this program from `begin` on: its number is the program's own modulo the programs.

    It is not carried from group to group: Triton 3.6 and 3.7 take a carried number that is a bound of an inner loop for
    what it was at first (tests/gluon/test_loops.py), and each program then took its first tile in every group.
    """
    programs = gl.num_programs(0)
    return begin + (gl.program_id(0) + programs - begin % programs) % programs
