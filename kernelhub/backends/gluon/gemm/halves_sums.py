# mypy: ignore-errors
"""What multiplying warpgroups do for one tile in bfloat16 or float16: sums over K that stay in the tensor cores.

A warpgroup issues the products of a step before those of the last have ended, and then passes on the last stage.
"""

from __future__ import annotations

from kernelhub.backends.gluon.language import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def sums_of_two(
    a_bufs, b_bufs, full, empty, step, blocks, ROW: gl.constexpr, COLUMN: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr, GATHERED: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Sums of 64 rows, those from ROW on, with COLUMNS of both blocks of weights. GATHERED: threads copied the rows."""
    sums0 = gl.zeros((64, COLUMNS), gl.float32, layout)
    sums1 = gl.zeros((64, COLUMNS), gl.float32, layout)
    for kb in range(blocks):
        s = step % STAGES
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        if GATHERED:
            fence_async_shared()
        a = a_bufs.index(s).slice(ROW, 64)
        b0 = b_bufs.index(2 * s).slice(COLUMN, COLUMNS).permute((1, 0))
        b1 = b_bufs.index(2 * s + 1).slice(COLUMN, COLUMNS).permute((1, 0))
        sums0 = warpgroup_mma(a, b0, sums0, is_async=True)
        sums1 = warpgroup_mma(a, b1, sums1, is_async=True)
        sums0, sums1 = warpgroup_mma_wait(2, deps=(sums0, sums1))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=kb > 0)
        step += 1
    sums0, sums1 = warpgroup_mma_wait(0, deps=(sums0, sums1))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return sums0, sums1
