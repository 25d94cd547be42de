"""Calls of `attention` and `paged_attention` as serving makes them."""

from __future__ import annotations

import torch

from kernelhub.ops.attention.problem import ONE, AttentionProblem, PagedAttentionProblem
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values, kv_scales

_CODE = 2.0**-6  # what a code of a float8 cache counts
_WINDOW = 1023


def attention_calls(problem: AttentionProblem, sizes: Sizes, values: Values) -> Calls:
    """Packed sequences, or batches of equal ones. `sizes`: ``window``, keys that a query of a windowed layer sees."""
    features = _features(problem, sizes, values)

    def call(batch: Batch) -> Arguments:
        made: Arguments = {}
        rows: tuple[int, ...] = (batch.tokens,)
        kv_rows: tuple[int, ...] = (sum(batch.kv_lens),)
        if problem.ragged:
            made["cu_seqlens_q"], made["cu_seqlens_k"] = values.offsets(batch.q_lens), values.offsets(batch.kv_lens)
            made |= {"max_seqlen_q": batch.max_q_len, "max_seqlen_k": max(batch.kv_lens)}
        else:
            rows = (batch.num_seqs, batch.q_lens[0])
            kv_rows = (batch.num_seqs, batch.kv_lens[0])
        heads = (*kv_rows, problem.num_kv_heads)
        return {
            "q": values.normal(*rows, problem.num_q_heads, problem.head_dim_qk, dtype=problem.q_dtype),
            "k": values.normal(*heads, problem.head_dim_qk, dtype=problem.kv_dtype),
            "v": values.normal(*heads, problem.head_dim_vo, dtype=problem.kv_dtype),
            **made,
            **features,
        }

    return call


def paged_attention_calls(problem: PagedAttentionProblem, sizes: Sizes, values: Values) -> Calls:
    """A step over pages: of decode, speculation, chunks or a mixture. `sizes` as of `attention_calls`."""
    features = _features(problem, sizes, values)
    element = getattr(torch, problem.kv_dtype).itemsize
    page_bytes = problem.page_size * problem.num_kv_heads * (problem.head_dim_qk + problem.head_dim_vo) * element

    def call(batch: Batch) -> Arguments:
        num_pages, table = values.pages(batch, problem.page_size, page_bytes)
        pages = (num_pages, *problem.kv_dims)
        made: Arguments = {
            "q": values.normal(*_rows(problem, batch), problem.num_q_heads, problem.head_dim_qk, dtype=problem.q_dtype),
            "k_cache": values.normal(*pages, problem.head_dim_qk, dtype=problem.kv_dtype),
            "v_cache": values.normal(*pages, problem.head_dim_vo, dtype=problem.kv_dtype),
            "block_table": table,
            "seq_lens": values.integers(batch.kv_lens),
            "kv_layout": problem.kv_layout,
        }
        if problem.ragged:
            made |= {"cu_seqlens_q": values.offsets(batch.q_lens), "max_seqlen_q": batch.max_q_len}
        return made | features

    return call


def _rows(problem: AttentionProblem, batch: Batch) -> tuple[int, ...]:
    """The first dimensions of q."""
    if problem.ragged:
        return (batch.tokens,)
    return (batch.num_seqs,) if problem.q_len == ONE else (batch.num_seqs, batch.q_lens[0])


def _features(problem: AttentionProblem, sizes: Sizes, values: Values) -> Arguments:
    """The features of a layer's calls."""
    made: Arguments = {"causal": problem.causal}
    if problem.window_left or problem.window_right:
        window = sizes.get("window", _WINDOW)
        made["window"] = (window if problem.window_left else -1, window if problem.window_right else -1)
    if problem.softcap:
        made["softcap"] = 50.0
    if problem.sinks:
        made["sinks"] = values.normal(problem.num_q_heads, dtype=problem.q_dtype)
    if problem.lse:
        made["return_lse"] = True
    if problem.kv_scale is not None:
        made |= {name: kv_scales(values, problem.kv_scale, problem.num_kv_heads, _CODE) for name in _SCALES}
    return made


_SCALES = ("k_scale", "v_scale")
