"""Records of the torch kernels of `write_kv_cache`."""

from __future__ import annotations

from kernelhub.backends.torch import standings
from kernelhub.backends.torch.devices import ANYWHERE
from kernelhub.dispatch.constraint import OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import verified
from kernelhub.ops.attention.problem import FLOATS, QUANTISED
from kernelhub.ops.kv_cache.problem import ROPE, STYLES

_H100 = verified(
    "hopper",
    evidence="NVIDIA H100 80GB HBM3, 2026-11-25, torch 2.11.0+cu130, write_kv_cache by torch on a GPU: 41 tests passed "
    "(benchmarks/results/cuda_h100.json)",
)
_CPU = verified(
    "cpu",
    evidence="CPU, 2 cores, 2026-11-25, torch 2.13.0+cpu, write_kv_cache by torch: 54 tests passed "
    "(benchmarks/results/own_ops_cpu.json)",
)
_ROPE_H100 = verified(
    "hopper",
    evidence="NVIDIA H100 80GB HBM3, 2026-11-26, torch 2.11.0+cu130, write_kv_cache with rope by torch on a GPU: "
    "20 tests passed (benchmarks/results/cuda_h100.json)",
)
_ROPE_CPU = verified(
    "cpu",
    evidence="CPU, 2 cores, 2026-11-26, torch 2.13.0+cpu, write_kv_cache with rope by torch: 26 tests passed "
    "(benchmarks/results/own_ops_cpu.json)",
)

KERNELS = (
    Kernel(
        op="write_kv_cache",
        name="torch.scatter",
        target="kernelhub.backends.torch.kv_cache.scatter:Scatter",
        summary="an indexed store for keys and one for values",
        band=Band.REFERENCE,
        constraints=(
            ANYWHERE,
            dtype_in("dtype", *FLOATS),
            dtype_in("kv_dtype", *FLOATS, *QUANTISED),
            anything("num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size", "rotary_dim"),
        ),
        features=frozenset({"kv_scale=value", "kv_scale=tensor", "kv_scale=head", "kv_layout=HND"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=(_CPU, _H100, *standings.STATED),
    ),
    Kernel(
        op="write_kv_cache",
        name="torch.rope_scatter",
        target="kernelhub.backends.torch.kv_cache.scatter:Scatter",
        summary="rotations in steps, then an indexed store for keys and one for values",
        band=Band.REFERENCE,
        constraints=(
            ANYWHERE,
            dtype_in("dtype", *FLOATS),
            dtype_in("kv_dtype", *FLOATS, *QUANTISED),
            OneOf("rope", STYLES, why="torch.scatter writes without one"),
            anything("num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size", "rotary_dim"),
        ),
        features=ROPE | {"kv_scale=value", "kv_scale=tensor", "kv_scale=head", "kv_layout=HND"},
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source="RoFormer (2021), section 3.2.2",
        standings=(_ROPE_CPU, _ROPE_H100, *standings.STATED),
    ),
)
