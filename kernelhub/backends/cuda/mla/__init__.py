"""Records of the CUDA kernels of latent attention."""

from __future__ import annotations

from kernelhub.backends.cuda.requirements import MACHINE
from kernelhub.backends.cuda.standings import standings
from kernelhub.dispatch.constraint import OnDevice, OneOf, SameValue, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import verified
from kernelhub.ops.attention.problem import FEW, ONE
from kernelhub.ops.mla.concat.problem import DTYPES

_WRITTEN = "the width that it is written for"
_PASSED = 82
_RAN = (
    f"NVIDIA H200, 2026-11-28, torch 2.11.0+cu130, latent decode by CUDA: {_PASSED} tests passed, none failed "
    "(benchmarks/results/cuda_mla_h200.json)"
)

KERNELS = (
    Kernel(
        op="mla_attention",
        name="cuda.decode",
        target="kernelhub.backends.cuda.mla.decode:Decode",
        summary="gluon.decode in CUDA C++: warps signal each other, pages are brought to L2 ahead",
        band=Band.PORTABLE,
        constraints=(
            OnDevice("nvidia", only=((9, 0),)),
            *MACHINE[1:],
            dtype_in("q_dtype", "bfloat16"),
            SameValue("q_dtype", "kv_dtype", why="it multiplies bfloat16"),
            OneOf("head_dim", (576,), why=_WRITTEN),
            OneOf("value_dim", (512,), why=_WRITTEN),
            OneOf("page_size", (64,), why="a step is a pair of pages of 64"),
            OneOf("q_len", (ONE, FEW), why="its programs walk all keys of a sequence"),
            anything("num_heads"),
        ),
        features=frozenset({"causal", "sinks", "lse"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        compiles_when_made=True,
        source="FlashMLA's schedule of two warpgroups (DeepSeek 2025)",
        standings=(verified("hopper", evidence=_RAN),),
    ),
    Kernel(
        op="concat_mla_k",
        name="cuda.concat",
        target="kernelhub.backends.cuda.mla.concat:Concat",
        summary="both parts in one launch, vectors of 16 bytes",
        band=Band.PORTABLE,
        constraints=(*MACHINE, dtype_in("dtype", *DTYPES), anything("num_heads", "nope_dim", "rope_dim")),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        compiles_when_made=True,
        standings=standings("concat_mla_k", 28),
    ),
)
