"""Records of the CUDA kernels of attention."""

from __future__ import annotations

from kernelhub.backends.cuda.requirements import MACHINE
from kernelhub.dispatch.constraint import MultipleOf, OnDevice, OneOf, Rule, SameValue, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import verified
from kernelhub.ops.attention.problem import FEW, ONE, QUANTISED, PagedAttentionProblem

_WIDTHS = (64, 128, 256)
_HELD = 16  # keys of a product, all of one page
_PASSED = 155
_RAN = (
    f"NVIDIA H200, 2026-11-28, torch 2.11.0+cu130, decode over pages by CUDA: {_PASSED} tests passed, none failed "
    "(benchmarks/results/cuda_paged_h200.json)"
)


def _multiplied(problem: PagedAttentionProblem) -> str | None:
    same = problem.kv_dtype == problem.q_dtype or problem.kv_dtype in QUANTISED
    return None if same else f"keys are {problem.kv_dtype}, queries {problem.q_dtype}"


KERNELS = (
    Kernel(
        op="paged_attention",
        name="cuda.paged_decode",
        target="kernelhub.backends.cuda.attention.decode:Decode",
        summary="decode in CUDA C++: each warp has keys and a ring of its own, equal parts of all keys",
        band=Band.PORTABLE,
        constraints=(
            OnDevice("nvidia", only=((9, 0),)),
            *MACHINE[1:],
            dtype_in("q_dtype", "bfloat16", "float16"),
            Rule(("kv_dtype", "q_dtype"), _multiplied),
            OneOf("head_dim_qk", _WIDTHS, why="the widths that it is written for"),
            SameValue("head_dim_qk", "head_dim_vo", why="the widths that it is written for"),
            MultipleOf("page_size", _HELD, why=f"a product has {_HELD} keys of one page"),
            OneOf("q_len", (ONE, FEW), why="its programs hold all rows of a sequence"),
            anything("num_q_heads", "num_kv_heads"),
        ),
        features=frozenset(
            {
                "ragged",
                "causal",
                "window_left",
                "softcap",
                "sinks",
                "lse",
                "kv_scale=value",
                "kv_scale=tensor",
                "kv_scale=head",
                "kv_layout=HND",
            }
        ),
        graph=GraphLevel.FULL,
        deterministic=True,
        compiles_when_made=True,
        source="Flash-Decoding (Dao et al. 2023)",
        standings=(verified("hopper", evidence=_RAN),),
    ),
)
