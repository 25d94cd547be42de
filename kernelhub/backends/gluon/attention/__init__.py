"""Records of the Gluon kernels of attention."""

from __future__ import annotations

from kernelhub.backends.gluon.requirements import MACHINE
from kernelhub.backends.gluon.standings import standings
from kernelhub.dispatch.constraint import Constraint, OneOf, Rule, SameValue, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import Standing
from kernelhub.ops.attention.problem import ANY, FEW, KV_SCALES, MANY, ONE, QUANTISED, AttentionProblem

_WRITTEN = "the widths that it is written for"


def _other_widths(problem: AttentionProblem) -> str | None:
    """Keys are as wide as values, or DeepSeek's 192 for 128."""
    qk, vo = problem.head_dim_qk, problem.head_dim_vo
    return None if qk == vo or (qk, vo) == (192, 128) else f"it is written for keys of {vo}, or 192 with values of 128"


_CONSTRAINTS = (
    *MACHINE,
    dtype_in("q_dtype", "bfloat16", "float16"),
    OneOf("head_dim_qk", (64, 96, 128, 192, 256), why=_WRITTEN),
    OneOf("head_dim_vo", (64, 96, 128, 256), why=_WRITTEN),
    Rule(("head_dim_qk", "head_dim_vo"), _other_widths),
    OneOf("q_len", (ONE, FEW, MANY, ANY)),
    anything("num_q_heads", "num_kv_heads"),
)
_FEATURES = frozenset({"ragged", "causal", "window_left", "window_right", "softcap", "sinks", "lse"})
_SOURCE = "FlashAttention-3 (Shah et al. 2024)"

_SIXTEEN_BITS = (SameValue("q_dtype", "kv_dtype", why="gluon.prefill_fp8 takes float8"),)
_PAGES = OneOf("page_size", (16, 32, 64, 128, 256), why="what TMA copies at once is part of a tile of 128 keys")
_FLOAT8 = (
    dtype_in("kv_dtype", *QUANTISED),
    OneOf("head_dim_qk", (64, 96, 128), why=_WRITTEN),
)
# What was timed and faster than Triton's (gluon_tiles_h200.json).
_DENSE_FLOAT8 = (
    dtype_in("kv_dtype", *QUANTISED),
    OneOf("head_dim_qk", (96, 128), why="gluon.prefill_fp8_any takes 64"),
)
_OF_FLOAT8 = _FEATURES | {f"kv_scale={form}" for form in KV_SCALES}
_OVER_FLOAT8 = "prefill over keys and values of float8, of which four warps make tiles in 16 bits for two warpgroups"
_ANY_FLOAT8 = "over keys and values of float8 as gluon.prefill_fp8, also with a left window and for heads of 96"
_FLOAT8_ADAPTER = "float8_adapter:PrefillOfFloat8"

_PIPELINED = "prefill in sections of heads that L2 holds, the first scores of a tile beside the last values before it"
_PIPELINED_ANY = "the same, also with a left window for heads of 64"
_PIPELINED_ADAPTER = "pipelined_adapter:PipelinedPrefill"


def _narrow_window(problem: AttentionProblem) -> str | None:
    """With the window of 128 of gpt-oss it takes 1.27 of Triton's time (prefill_forms_h100.json)."""
    if problem.head_dim_qk == 64 and problem.window_left:
        return "gluon.prefill_pipelined_any takes left windows of heads of 64, for which triton.prefill is faster"
    return None


_WHERE_FASTER = (*_SIXTEEN_BITS, Rule(("head_dim_qk", "window_left"), _narrow_window))


def _record(
    op: str,
    name: str,
    summary: str,
    constraints: tuple[Constraint, ...],
    features: frozenset[str],
    ran: tuple[Standing, ...],
    target: str,
) -> Kernel:
    return Kernel(
        op=op,
        name=name,
        target=f"kernelhub.backends.gluon.attention.{target}",
        summary=summary,
        band=Band.TUNED,
        constraints=(*_CONSTRAINTS, *constraints),
        features=features,
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source=_SOURCE,
        standings=ran,
    )


KERNELS = (
    _record(
        "paged_attention",
        "gluon.prefill_fp8",
        _OVER_FLOAT8,
        (dtype_in("kv_dtype", *QUANTISED), OneOf("head_dim_qk", (64, 128), why=_WRITTEN), _PAGES),
        (_OF_FLOAT8 | {"kv_layout=HND"}) - {"window_left"},
        standings(27, "gluon_more_h200.json"),
        _FLOAT8_ADAPTER,
    ),
    _record(
        "attention",
        "gluon.prefill_fp8",
        _OVER_FLOAT8,
        _DENSE_FLOAT8,
        _OF_FLOAT8 - {"window_left"},
        standings(10, "gluon_tests_h200.json"),
        _FLOAT8_ADAPTER,
    ),
    _record(
        "attention",
        "gluon.prefill_fp8_any",
        _ANY_FLOAT8,
        _FLOAT8,
        _OF_FLOAT8,
        standings(16, "gluon_tests_h200.json"),
        _FLOAT8_ADAPTER,
    ),
    _record(
        "paged_attention",
        "gluon.prefill_fp8_any",
        _ANY_FLOAT8,
        (*_FLOAT8, _PAGES),
        _OF_FLOAT8 | {"kv_layout=HND"},
        standings(28, "gluon_tests_h200.json"),
        _FLOAT8_ADAPTER,
    ),
    _record(
        "attention",
        "gluon.prefill_pipelined",
        _PIPELINED,
        _WHERE_FASTER,
        _FEATURES,
        standings(281, "gluon_tests_h100.json"),
        _PIPELINED_ADAPTER,
    ),
    _record(
        "attention",
        "gluon.prefill_pipelined_any",
        _PIPELINED_ANY,
        _SIXTEEN_BITS,
        _FEATURES,
        standings(281, "gluon_tests_h100.json"),
        _PIPELINED_ADAPTER,
    ),
    _record(
        "paged_attention",
        "gluon.prefill_pipelined",
        f"{_PIPELINED}; pages by TMA",
        (*_WHERE_FASTER, _PAGES),
        _FEATURES | {"kv_layout=HND"},
        standings(168, "gluon_tests_h100.json"),
        _PIPELINED_ADAPTER,
    ),
    _record(
        "paged_attention",
        "gluon.prefill_pipelined_any",
        _PIPELINED_ANY,
        (*_SIXTEEN_BITS, _PAGES),
        _FEATURES | {"kv_layout=HND"},
        standings(168, "gluon_tests_h100.json"),
        _PIPELINED_ADAPTER,
    ),
)
