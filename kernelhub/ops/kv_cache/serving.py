"""Calls of `write_kv_cache` as serving makes them."""

from __future__ import annotations

from torch import Tensor

from kernelhub.ops.kv_cache.problem import NEOX, NHD, KvCacheProblem
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values, kv_scales

_CODE = 2.0**-6  # what a code of a float8 cache counts
_Q_HEADS_PER_KV_HEAD = 4
_POSITIONS = 4096


def write_kv_cache_calls(problem: KvCacheProblem, sizes: Sizes, values: Values) -> Calls:
    """New tokens in the form of the projection's result, and the pages for them."""
    heads, d, dv = problem.num_kv_heads, problem.head_dim_qk, problem.head_dim_vo
    q_width = _Q_HEADS_PER_KV_HEAD * heads * d
    page = (problem.page_size, heads) if problem.kv_layout == NHD else (heads, problem.page_size)
    said: Arguments = {"kv_layout": problem.kv_layout}
    if problem.kv_scale is not None:
        said |= {name: kv_scales(values, problem.kv_scale, heads, _CODE) for name in ("k_scale", "v_scale")}

    def call(batch: Batch) -> Arguments:
        projected = values.normal(batch.tokens, q_width + heads * (d + dv), dtype=problem.dtype)
        q, k, v = projected.split([q_width, heads * d, heads * dv], 1)
        num_pages = -(-batch.tokens // problem.page_size) + 1
        return {
            "k": k.unflatten(1, (heads, d)),
            "v": v.unflatten(1, (heads, dv)),
            "k_cache": values.normal(num_pages, *page, d, dtype=problem.kv_dtype),
            "v_cache": values.normal(num_pages, *page, dv, dtype=problem.kv_dtype),
            "slot_mapping": values.order(num_pages * problem.page_size)[: batch.tokens],
            **said,
            **(
                {}
                if problem.rope is None
                else embedding(batch.tokens, q.unflatten(1, (_Q_HEADS_PER_KV_HEAD * heads, d)))
            ),
        }

    def embedding(tokens: int, q: Tensor) -> Arguments:
        return {
            "positions": values.order(max(tokens, _POSITIONS))[:tokens],
            "cos_sin_cache": values.normal(max(tokens, _POSITIONS), problem.rotary_dim, dtype="float32"),
            "is_neox": problem.rope == NEOX,
            **({"q": q} if problem.q else {}),
        }

    return call
