"""Facets and constraints of `mla_attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import facet, feature
from kernelhub.ops.attention.problem import FEW, FLOATS, FP8, ONE, Q_LENS
from kernelhub.probes.device import DeviceFacts

# How the scale of an fp8 cache arrives: a Python float, or a one-element tensor.
KV_SCALES = ("value", "tensor")
REGIMES = ("decode", "prefill", "mixed")


@dataclass(frozen=True)
class MlaProblem:
    """One configuration of `mla_attention`."""

    device: DeviceFacts = facet("where the tensors are")
    q_dtype: str = facet("dtype of q and out", values=FLOATS, default="bfloat16")
    kv_dtype: str = facet("dtype of the cache: that of q, or float8_e4m3fn", values=(*FLOATS, FP8), default="bfloat16")
    num_heads: int = facet("heads of q", default=128)
    head_dim: int = facet("width of a head of q and of a row of the cache", default=576)
    value_dim: int = facet("width of the latent, which is a head's value", default=512)
    page_size: int = facet("tokens per page of the cache", default=64)
    q_len: str = facet("query tokens per sequence: one, few (2 to 16), many, any", values=Q_LENS, default=ONE)
    ragged: bool = feature("sequences packed in [T, H, D] with cu_seqlens_q", False)
    causal: bool = feature("queries see no later keys", False)
    sparse: bool = feature("each query sees only the tokens that topk_indices lists", False)
    sinks: bool = feature("one learned extra score per head in the denominator", False)
    lse: bool = feature("the log of the softmax denominator is returned", False)
    kv_scale: str | None = feature("how the scale of an fp8 cache arrives", None, KV_SCALES)

    @property
    def rope_dim(self) -> int:
        """Width of the rotary part."""
        return self.head_dim - self.value_dim


def complete(facets: dict[str, Any]) -> dict[str, Any]:
    """Facets that a user wrote out, with those that follow: the dtype of the cache, the width of the latent."""
    implied: dict[str, Any] = {"kv_dtype": FP8 if facets.get("kv_scale") else facets.get("q_dtype", "bfloat16")}
    if facets.get("kv_dtype") == FP8:
        implied["kv_scale"] = KV_SCALES[0]
    if "head_dim" in facets:
        implied["value_dim"] = max(1, facets["head_dim"] - 64)
    elif "value_dim" in facets:
        implied["head_dim"] = facets["value_dim"] + 64
    return implied | facets


def contradiction(problem: MlaProblem) -> str | None:
    """Problems that no call can have."""
    if problem.value_dim > problem.head_dim:
        return f"value_dim is {problem.value_dim}, wider than a row of the cache, {problem.head_dim}"
    if problem.kv_dtype not in (problem.q_dtype, FP8):
        return f"kv_dtype is {problem.kv_dtype}, neither q_dtype, {problem.q_dtype}, nor {FP8}"
    if (problem.kv_dtype == FP8) != (problem.kv_scale is not None):
        return f"kv_dtype is {problem.kv_dtype} with kv_scale {problem.kv_scale}; scales belong to {FP8}"
    return None


NARROW_DECODE = "narrow_decode"
_NARROW = 16  # heads: 128 of DeepSeek on 8 devices


def regime(problem: MlaProblem) -> str:
    """``decode`` for few query tokens per sequence, ``prefill`` for many, ``mixed`` where both may come.

    ``narrow_decode`` for one query token of up to 16 heads, which leave most of a tile of 64 rows empty.
    """
    if problem.q_len == ONE and problem.num_heads <= _NARROW:
        return NARROW_DECODE
    if problem.q_len in (ONE, FEW):
        return "decode"
    return "mixed" if problem.ragged else "prefill"


MLA_ATTENTION = OpRecord(
    name="mla_attention",
    summary="latent attention with absorbed projections over a paged cache, dense or sparse",
    problem=MlaProblem,
    complete=complete,
    contradiction=contradiction,
    regimes=(*REGIMES, NARROW_DECODE),
    regime=regime,
)
