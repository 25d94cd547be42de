"""Records of the CUDA kernels of merging attention states."""

from __future__ import annotations

from kernelhub.backends.cuda.requirements import MACHINE
from kernelhub.backends.cuda.standings import standings
from kernelhub.dispatch.constraint import OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.merge.problem import FLOATS, TWO

KERNELS = (
    Kernel(
        op="merge_attention_states",
        name="cuda.merge",
        target="kernelhub.backends.cuda.merge.two:Merge",
        summary="two states in one launch, vectors of 16 bytes",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            dtype_in("dtype", *FLOATS),
            OneOf("parts", (TWO,), why="the kernel reads two states"),
            anything("num_heads", "head_dim"),
        ),
        features=frozenset({"batched", "lse", "out_scale=value", "out_scale=tensor"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        compiles_when_made=True,
        standings=standings("merge_attention_states", 38),
    ),
)
