"""Records of the CUDA kernels of the indexer."""

from __future__ import annotations

from kernelhub.backends.cuda.requirements import MACHINE
from kernelhub.backends.cuda.standings import standings
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel

KERNELS = (
    Kernel(
        op="topk_indices",
        name="cuda.select",
        target="kernelhub.backends.cuda.indexer.topk:TopK",
        summary="a row by a block or a cluster: radix selection by histograms of three digits in shared memory",
        band=Band.PORTABLE,
        constraints=(*MACHINE, anything("k")),
        features=frozenset({"row_starts", "row_ends"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        compiles_when_made=True,
        standings=standings("topk_indices", 66, date_on_h100="2026-11-26"),
    ),
)
