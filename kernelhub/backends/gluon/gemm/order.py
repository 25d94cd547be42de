# mypy: ignore-errors
"""The order in which the programs of a product take its tiles."""

from __future__ import annotations

from kernelhub.backends.gluon.language import gl, gluon


@gluon.jit
def tile_of(t, tiles_m, tiles_n, GROUP: gl.constexpr):
    """(row, column) of the t-th tile: GROUP rows of tiles are gone over together, so that they share b in L2."""
    wide = GROUP * tiles_n
    first = t // wide * GROUP
    high = gl.minimum(tiles_m - first, GROUP)
    within = t % wide
    return first + within % high, within // high
