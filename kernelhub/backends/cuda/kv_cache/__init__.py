"""Records of the CUDA kernels of `write_kv_cache`."""

from __future__ import annotations

from kernelhub.backends.cuda.requirements import MACHINE
from kernelhub.backends.cuda.standings import standings
from kernelhub.dispatch.constraint import OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.attention.problem import FLOATS, QUANTISED
from kernelhub.ops.kv_cache.problem import ROPE, STYLES

KERNELS = (
    Kernel(
        op="write_kv_cache",
        name="cuda.write",
        target="kernelhub.backends.cuda.kv_cache.write:Write",
        summary="keys and values in one launch, vectors of 16 bytes",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            dtype_in("dtype", *FLOATS),
            dtype_in("kv_dtype", *FLOATS, *QUANTISED),
            anything("num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size", "rotary_dim"),
        ),
        features=frozenset({"kv_scale=value", "kv_scale=tensor", "kv_scale=head", "kv_layout=HND"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        compiles_when_made=True,
        standings=standings("write_kv_cache", 41),
    ),
    Kernel(
        op="write_kv_cache",
        name="cuda.rope_write",
        target="kernelhub.backends.cuda.kv_cache.write:Write",
        summary="queries rotated in place, rotated keys and values to the cache, in one launch, vectors of 16 bytes",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            dtype_in("dtype", *FLOATS),
            dtype_in("kv_dtype", *FLOATS, *QUANTISED),
            OneOf("rope", STYLES, why="cuda.write writes without one"),
            anything("num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size", "rotary_dim"),
        ),
        features=ROPE | {"kv_scale=value", "kv_scale=tensor", "kv_scale=head", "kv_layout=HND"},
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        compiles_when_made=True,
        source="RoFormer (2021), section 3.2.2",
        standings=standings("write_kv_cache with rope", 20, date_on_h100="2026-11-26"),
    ),
)
