"""Records of the Gluon kernels of attention."""

from __future__ import annotations

from kernelhub.backends.gluon.requirements import MACHINE
from kernelhub.backends.gluon.standings import NOT_RUN
from kernelhub.dispatch.constraint import OneOf, Rule, SameValue, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.attention.problem import ANY, FEW, MANY, ONE, AttentionProblem

_WRITTEN = "the widths that it is written for"


def _other_widths(problem: AttentionProblem) -> str | None:
    """Keys are as wide as values, or DeepSeek's 192 for 128."""
    qk, vo = problem.head_dim_qk, problem.head_dim_vo
    return None if qk == vo or (qk, vo) == (192, 128) else f"it is written for keys of {vo}, or 192 with values of 128"


_CONSTRAINTS = (
    *MACHINE,
    dtype_in("q_dtype", "bfloat16", "float16"),
    SameValue("q_dtype", "kv_dtype", why="float8 is not written"),
    OneOf("head_dim_qk", (64, 128, 192, 256), why=_WRITTEN),
    OneOf("head_dim_vo", (64, 128, 256), why=_WRITTEN),
    Rule(("head_dim_qk", "head_dim_vo"), _other_widths),
    OneOf("q_len", (ONE, FEW, MANY, ANY)),
    anything("num_q_heads", "num_kv_heads"),
)
_FEATURES = frozenset({"ragged", "causal", "window_left", "window_right", "softcap", "sinks", "lse"})
_SOURCE = "FlashAttention-3 (Shah et al. 2024)"

KERNELS = (
    Kernel(
        op="attention",
        name="gluon.prefill",
        target="kernelhub.backends.gluon.attention.adapter:Prefill",
        summary="a loading warp and two warpgroups of 64 rows, softmax beside the next products",
        band=Band.TUNED,
        constraints=_CONSTRAINTS,
        features=_FEATURES,
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source=_SOURCE,
        standings=NOT_RUN,
    ),
    Kernel(
        op="paged_attention",
        name="gluon.prefill",
        target="kernelhub.backends.gluon.attention.adapter:Prefill",
        summary="the same, whose loading warp copies pages by TMA",
        band=Band.TUNED,
        constraints=(
            *_CONSTRAINTS,
            OneOf("page_size", (16, 32, 64, 128, 256), why="what TMA copies at once is part of a tile of 128 keys"),
        ),
        features=_FEATURES | {"kv_layout=HND"},
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source=_SOURCE,
        standings=NOT_RUN,
    ),
)
