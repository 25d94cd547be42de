"""Calls of `write_kv_cache` as serving makes them."""

from __future__ import annotations

from kernelhub.ops.kv_cache.problem import NHD, KvCacheProblem
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values, kv_scales

_CODE = 2.0**-6  # what a code of a float8 cache counts
_Q_HEADS_PER_KV_HEAD = 4


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
        _, k, v = projected.split([q_width, heads * d, heads * dv], 1)
        num_pages = -(-batch.tokens // problem.page_size) + 1
        return {
            "k": k.unflatten(1, (heads, d)),
            "v": v.unflatten(1, (heads, dv)),
            "k_cache": values.normal(num_pages, *page, d, dtype=problem.kv_dtype),
            "v_cache": values.normal(num_pages, *page, dv, dtype=problem.kv_dtype),
            "slot_mapping": values.order(num_pages * problem.page_size)[: batch.tokens],
            **said,
        }

    return call
