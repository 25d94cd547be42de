"""Records of FlashInfer's merging of attention states."""

from __future__ import annotations

from kernelhub.backends.flashinfer import calls, standings
from kernelhub.backends.flashinfer.requirements import SM80_ON, Module, requirements
from kernelhub.dispatch.constraint import OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel

KERNELS = (
    Kernel(
        op="merge_attention_states",
        name="flashinfer.merge",
        target="kernelhub.backends.flashinfer.cascade.merge:Merge",
        summary="states are copied into the library's order, except those of parts without keys; "
        "compiled at first use unless built ahead",
        band=Band.TUNED,
        constraints=(
            *requirements(SM80_ON, calls.MERGE_IN_PLACE, calls.MERGE_MANY),
            Module((), lambda _: ("cascade",)),
            dtype_in("dtype", "float16", "bfloat16", why="the library compiles it for these"),
            OneOf("head_dim", (64, 128, 256, 512), why="the library compiles it for these"),
            anything("num_heads", "parts"),
        ),
        features=frozenset({"batched", "lse"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source="FlashInfer (Ye et al. 2025)",
        standings=standings.FA2,
    ),
)
