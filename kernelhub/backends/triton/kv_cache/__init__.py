"""Records of the Triton kernels of `write_kv_cache`."""

from __future__ import annotations

from kernelhub.backends.triton import standings
from kernelhub.backends.triton.requirements import MACHINE
from kernelhub.dispatch.constraint import Between, OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import verified
from kernelhub.ops.attention.problem import FLOATS, QUANTISED
from kernelhub.ops.kv_cache.problem import ROPE, STYLES

_H100 = verified(
    "hopper",
    evidence="NVIDIA H100 80GB HBM3, 2026-11-25, torch 2.11.0+cu130, Triton 3.6.0, write_kv_cache by Triton: 41 tests "
    "passed (benchmarks/results/cuda_h100.json)",
)
_CPU = verified(
    "cpu",
    evidence="interpreted: CPU, 2 cores, 2026-11-25, torch 2.13.0+cpu, write_kv_cache by Triton, interpreted: 54 tests "
    "passed (benchmarks/results/own_ops_cpu.json)",
)
_ROPE_H100 = verified(
    "hopper",
    evidence="NVIDIA H100 80GB HBM3, 2026-11-26, torch 2.11.0+cu130, Triton 3.6.0, write_kv_cache with rope by Triton: "
    "20 tests passed (benchmarks/results/cuda_h100.json)",
)
_ROPE_CPU = verified(
    "cpu",
    evidence="interpreted: CPU, 2 cores, 2026-11-26, torch 2.13.0+cpu, write_kv_cache with rope by Triton, "
    "interpreted: 26 tests passed (benchmarks/results/own_ops_cpu.json)",
)

KERNELS = (
    Kernel(
        op="write_kv_cache",
        name="triton.write",
        target="kernelhub.backends.triton.kv_cache.adapter:Write",
        summary="keys and values in one launch",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            dtype_in("dtype", *FLOATS),
            dtype_in("kv_dtype", *FLOATS, *QUANTISED),
            Between("head_dim_qk", 1, 2048, why="a program holds whole heads"),
            Between("head_dim_vo", 1, 2048, why="a program holds whole heads"),
            anything("num_kv_heads", "page_size", "rotary_dim"),
        ),
        features=frozenset({"kv_scale=value", "kv_scale=tensor", "kv_scale=head", "kv_layout=HND"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=(_CPU, _H100, *standings.AHEAD_ELSEWHERE),
    ),
    Kernel(
        op="write_kv_cache",
        name="triton.rope_write",
        target="kernelhub.backends.triton.kv_cache.rope_adapter:RopeWrite",
        summary="queries rotated in place, rotated keys and values to the cache, in one launch",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            dtype_in("dtype", *FLOATS),
            dtype_in("kv_dtype", *FLOATS, *QUANTISED),
            OneOf("rope", STYLES, why="triton.write writes without one"),
            Between("head_dim_qk", 1, 2048, why="a program holds whole heads"),
            Between("head_dim_vo", 1, 2048, why="a program holds whole heads"),
            anything("num_kv_heads", "page_size", "rotary_dim"),
        ),
        features=ROPE | {"kv_scale=value", "kv_scale=tensor", "kv_scale=head", "kv_layout=HND"},
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source="RoFormer (2021), section 3.2.2",
        standings=(_ROPE_CPU, _ROPE_H100, *standings.AHEAD_ELSEWHERE),
    ),
)
