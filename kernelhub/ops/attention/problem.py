"""Facets and constraints of attention calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import bucket, facet, feature
from kernelhub.probes.device import DeviceFacts

FLOATS = ("float32", "float16", "bfloat16")
FP8, E5M2 = "float8_e4m3fn", "float8_e5m2"
QUANTISED = (FP8, E5M2)  # of keys and values, with scales

# Buckets of query tokens per sequence. A kernel that keeps all query rows of a KV head in one tile needs
# few of them; how many a ragged batch has is known only when the caller says so (`max_seqlen_q`).
ONE, FEW, MANY, ANY = "one", "few", "many", "any"
Q_LENS = (ONE, FEW, MANY, ANY)
FEW_TOKENS = 16
# Query tokens of every sequence of a batch that is not ragged, where there are many; order lines distinguish them.
SHORT, LONG = LENGTHS = ("short", "long")
LONG_TOKENS = 4096
_Q_LEN_DOC = "query tokens per sequence: one, few (2 to 16), many, any"

# How the scales of an fp8 KV arrive: a Python float, a one-element tensor, a tensor of one per KV head.
KV_SCALES = ("value", "tensor", "head")


def q_len_bucket(tokens: int) -> str:
    """Bucket of a number of query tokens per sequence."""
    return ONE if tokens <= 1 else FEW if tokens <= FEW_TOKENS else MANY


@dataclass(frozen=True)
class AttentionProblem:
    """One configuration of `attention` or, with more facets, of `paged_attention`."""

    device: DeviceFacts = facet("where the tensors are")
    q_dtype: str = facet("dtype of q and out", values=FLOATS, default="bfloat16")
    kv_dtype: str = facet("dtype of k and v: that of q, or float8", values=(*FLOATS, *QUANTISED), default="bfloat16")
    head_dim_qk: int = facet("width of a head of q and k", default=128)
    head_dim_vo: int = facet("width of a head of v and out", default=128)
    num_q_heads: int = facet("heads of q", default=32)
    num_kv_heads: int = facet("heads of k and v", default=8)
    q_len: str = facet(_Q_LEN_DOC, values=Q_LENS, default=MANY)
    ragged: bool = feature("sequences packed in [T, H, D] with cu_seqlens", False)
    causal: bool = feature("queries see no later keys", False)
    window_left: bool = feature("a limit on the keys before a query", False)
    window_right: bool = feature("a limit on the keys after a query", False)
    softcap: bool = feature("scores bounded by softcap * tanh(scores / softcap)", False)
    sinks: bool = feature("one learned extra score per head in the denominator", False)
    lse: bool = feature("the log of the softmax denominator is returned", False)
    kv_scale: str | None = feature("how the scales of an fp8 KV arrive", None, KV_SCALES)

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def kv_dims(self) -> tuple[int, ...]:
        """Dimensions of k and v between their tokens or pages and the width of a head."""
        return (self.num_kv_heads,)

    operand_names = ("q", "k", "v")


@dataclass(frozen=True)
class DenseAttentionProblem(AttentionProblem):
    """One configuration of `attention`."""

    length: str = bucket(
        f"query tokens per sequence where all have as many: short (up to {LONG_TOKENS - 1}), long; ragged is short",
        values=LENGTHS,
        default=SHORT,
    )


@dataclass(frozen=True)
class PagedAttentionProblem(AttentionProblem):
    """One configuration of `paged_attention`."""

    q_len: str = facet(_Q_LEN_DOC, values=Q_LENS, default=ONE)
    causal: bool = feature("queries see no later keys", False, usual=True)
    page_size: int = facet("tokens per page of the KV cache", default=16)
    kv_layout: str = feature("order of a page's dimensions", "NHD", ("HND",))

    @property
    def kv_dims(self) -> tuple[int, ...]:
        """Dimensions of the caches between their pages and the width of a head."""
        dims = (self.page_size, self.num_kv_heads)
        return dims if self.kv_layout == "NHD" else dims[::-1]

    operand_names = ("q", "k_cache", "v_cache")


def complete(facets: dict[str, Any]) -> dict[str, Any]:
    """Facets that a user wrote out, with those that follow: the dtype of KV, the width of v."""
    q_dtype = facets.get("q_dtype", "bfloat16")
    implied = {"kv_dtype": FP8 if facets.get("kv_scale") else q_dtype}
    if "head_dim_qk" in facets:
        implied["head_dim_vo"] = facets["head_dim_qk"]
    if facets.get("kv_dtype") in QUANTISED:
        implied["kv_scale"] = KV_SCALES[0]
    return implied | facets


def contradiction(problem: AttentionProblem) -> str | None:
    """Problems that no call can have."""
    if problem.num_q_heads % problem.num_kv_heads:
        return f"num_q_heads is {problem.num_q_heads}, no multiple of num_kv_heads, {problem.num_kv_heads}"
    if problem.kv_dtype not in (problem.q_dtype, *QUANTISED):
        return f"kv_dtype is {problem.kv_dtype}, neither q_dtype, {problem.q_dtype}, nor {' nor '.join(QUANTISED)}"
    if (problem.kv_dtype in QUANTISED) != (problem.kv_scale is not None):
        return f"kv_dtype is {problem.kv_dtype} with kv_scale {problem.kv_scale}; scales belong to float8"
    if (
        isinstance(problem, DenseAttentionProblem)
        and problem.length == LONG
        and (problem.ragged or problem.q_len != MANY)
    ):
        return f"length is {LONG}, which is of many query tokens in sequences that are not ragged"
    return None


REGIMES = ("decode", "speculative", "prefill", "mixed")
LONG_PREFILL = "long_prefill"
OTHER_DECODE = "other_decode"
_HEADS_TOGETHER = 16  # query heads of a KV head


def regime(problem: AttentionProblem) -> str:
    """``decode`` for few query tokens per sequence, ``prefill`` for many.

    Of pages, ``speculative`` for more than one of them, ``mixed`` where both may come, and ``other_decode`` for one in
    a window, of heads narrower than 128 in 16 or 32 bits, or of more than 16 heads to a KV head. Of tensors,
    ``long_prefill`` for 4096 and more, where it was measured: causal, heads of 128.
    """
    if isinstance(problem, DenseAttentionProblem) and problem.length == LONG:
        return LONG_PREFILL if problem.causal and problem.head_dim_qk == problem.head_dim_vo == 128 else "prefill"
    paged = isinstance(problem, PagedAttentionProblem)
    if paged and problem.q_len == ONE:
        narrow = problem.head_dim_qk < 128 and problem.kv_dtype not in QUANTISED
        other = problem.window_left or narrow or problem.group_size > _HEADS_TOGETHER
        return OTHER_DECODE if other else "decode"
    if problem.q_len in (ONE, FEW):
        return "speculative" if paged else "decode"
    return "mixed" if problem.ragged and paged else "prefill"


ATTENTION = OpRecord(
    name="attention",
    summary="softmax attention over tensors, batched or ragged",
    problem=DenseAttentionProblem,
    complete=complete,
    contradiction=contradiction,
    regimes=(*REGIMES, LONG_PREFILL),
    regime=regime,
)
PAGED_ATTENTION = OpRecord(
    name="paged_attention",
    summary="softmax attention over a paged KV cache: decode, speculative decode, prefill, mixed",
    problem=PagedAttentionProblem,
    complete=complete,
    contradiction=contradiction,
    regimes=(*REGIMES, OTHER_DECODE),
    regime=regime,
)
