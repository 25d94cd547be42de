"""Records of the CUDA kernels of `write_kv_cache`."""

from __future__ import annotations

from kernelhub.backends.cuda.requirements import MACHINE
from kernelhub.backends.cuda.standings import standings
from kernelhub.dispatch.constraint import anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.attention.problem import FLOATS, QUANTISED

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
            anything("num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size"),
        ),
        features=frozenset({"kv_scale=value", "kv_scale=tensor", "kv_scale=head", "kv_layout=HND"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=standings("write_kv_cache", 41),
    ),
)
