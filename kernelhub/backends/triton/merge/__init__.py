"""Records of the Triton kernels of merging attention states."""

from __future__ import annotations

from kernelhub.backends.triton import standings
from kernelhub.backends.triton.requirements import MACHINE
from kernelhub.dispatch.constraint import Between, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.merge.problem import FLOATS

KERNELS = (
    Kernel(
        op="merge_attention_states",
        name="triton.merge",
        target="kernelhub.backends.triton.merge.adapter:Merge",
        summary="all parts in one pass",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            dtype_in("dtype", *FLOATS),
            Between("head_dim", 1, 1024, why="a program holds a whole head"),
            anything("num_heads", "parts"),
        ),
        features=frozenset({"batched", "lse", "out_scale=value", "out_scale=tensor"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source="FlashAttention-2 (Dao 2023), section 3.1",
        standings=standings.STANDINGS,
    ),
)
