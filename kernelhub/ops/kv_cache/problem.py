"""Facets and constraints of `write_kv_cache`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import facet, feature
from kernelhub.ops.attention.problem import FLOATS, FP8, KV_SCALES, QUANTISED
from kernelhub.probes.device import DeviceFacts

NHD, HND = "NHD", "HND"
NEOX, INTERLEAVED = "neox", "interleaved"
STYLES = (NEOX, INTERLEAVED)  # of rotary embeddings
ROPE = frozenset({"rope=neox", "rope=interleaved", "q"})  # features of a kernel that can all of them


@dataclass(frozen=True)
class KvCacheProblem:
    """One configuration of `write_kv_cache`."""

    device: DeviceFacts = facet("where the tensors are")
    dtype: str = facet("dtype of the new keys and values", values=FLOATS, default="bfloat16")
    kv_dtype: str = facet(
        "dtype of the caches: that of the tokens, or float8", values=(*FLOATS, *QUANTISED), default="bfloat16"
    )
    num_kv_heads: int = facet("heads of k and v", default=8)
    head_dim_qk: int = facet("width of a head of k", default=128)
    head_dim_vo: int = facet("width of a head of v", default=128)
    page_size: int = facet("tokens per page of the caches", default=16)
    kv_scale: str | None = feature("how the scales of an fp8 KV arrive", None, KV_SCALES)
    kv_layout: str = feature("order of a page's dimensions", NHD, (HND,))
    rotary_dim: int = facet("columns of a head that are rotated; 1 without rope", default=1)
    rope: str | None = feature(
        "a rotary embedding of the keys: of both halves of columns, or of neighbours", None, STYLES
    )
    q: bool = feature("queries that are rotated in place", False)


def complete(facets: dict[str, Any]) -> dict[str, Any]:
    """Facets that a user wrote out, with the dtype of the caches that follows."""
    implied: dict[str, Any] = {"kv_dtype": FP8 if facets.get("kv_scale") else facets.get("dtype", "bfloat16")}
    if facets.get("kv_dtype") in QUANTISED:
        implied["kv_scale"] = KV_SCALES[0]
    if facets.get("q"):
        implied["rope"] = NEOX  # queries are there to be rotated
    if facets.get("rope", implied.get("rope")):
        implied["rotary_dim"] = facets.get("head_dim_qk", 128)
    return implied | facets


def contradiction(problem: KvCacheProblem) -> str | None:
    """Problems that no call can have."""
    if problem.kv_dtype not in (problem.dtype, *QUANTISED):
        return f"kv_dtype is {problem.kv_dtype}, neither dtype, {problem.dtype}, nor {' or '.join(QUANTISED)}"
    if (problem.kv_dtype in QUANTISED) != (problem.kv_scale is not None):
        return f"kv_dtype is {problem.kv_dtype} with kv_scale {problem.kv_scale}; scales belong to float8"
    if problem.kv_scale == "head" and problem.num_kv_heads == 1:
        return "kv_scale is head with num_kv_heads 1: the scale of one head is a tensor of one element"
    if problem.rope is None:
        if problem.rotary_dim != 1 or problem.q:
            return f"rotary_dim is {problem.rotary_dim} and q {problem.q} without rope"
    elif problem.rotary_dim % 2 or problem.rotary_dim > problem.head_dim_qk:
        return f"rotary_dim is {problem.rotary_dim}, no even number up to head_dim_qk, {problem.head_dim_qk}"
    return None


WRITE_KV_CACHE = OpRecord(
    name="write_kv_cache",
    summary="write keys and values of new tokens into the pages of a KV cache",
    problem=KvCacheProblem,
    complete=complete,
    contradiction=contradiction,
)
