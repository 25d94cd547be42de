"""Calls of the indexer's ops as serving makes them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.indexer.problem import LogitsProblem, PagedLogitsProblem, TopKProblem
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values


def mqa_logits_calls(problem: LogitsProblem, sizes: Sizes, values: Values) -> Calls:
    """Queries of a prefill over the keys of their sequences, which are consecutive."""

    def call(batch: Batch) -> Arguments:
        keys, dtype = sum(batch.kv_lens), problem.dtype
        starts, ends = _ranges(batch)
        return {
            "q": values.normal(batch.tokens, problem.num_heads, problem.head_dim, dtype=dtype),
            "k": values.normal(keys, problem.head_dim, dtype=dtype),
            "k_scale": values.near(keys, size=2.0**-6) if problem.k_scale else None,
            "weights": values.normal(batch.tokens, problem.num_heads, dtype=torch.float32, size=2.0**-9),
            "cu_seqlen_ks": values.integers(starts),
            "cu_seqlen_ke": values.integers(ends),
        }

    return call


def paged_mqa_logits_calls(problem: PagedLogitsProblem, sizes: Sizes, values: Values) -> Calls:
    """A decode step, one query per sequence. `sizes`: ``next_n``, more of them; ``fused``, scales within the pages."""
    next_n = sizes.get("next_n", 1)
    fused = bool(sizes.get("fused", 0)) and problem.k_scale and problem.dtype == "float8_e4m3fn"
    itemsize = getattr(torch, problem.dtype).itemsize
    page_bytes = problem.page_size * (problem.head_dim * itemsize + 4)

    def call(batch: Batch) -> Arguments:
        num_pages, table = values.pages(batch, problem.page_size, page_bytes)
        rows = batch.num_seqs * next_n
        cache: Tensor = values.normal(num_pages, problem.page_size, problem.head_dim, dtype=problem.dtype)
        scale: Tensor | None = values.near(num_pages, problem.page_size, size=2.0**-6) if problem.k_scale else None
        if fused and scale is not None:
            parts = cache.view(torch.uint8).reshape(num_pages, -1), scale.view(torch.uint8).reshape(num_pages, -1)
            cache, scale = torch.cat(parts, 1).view(num_pages, problem.page_size, problem.head_dim + 4), None
        return {
            "q": values.normal(batch.num_seqs, next_n, problem.num_heads, problem.head_dim, dtype=problem.dtype),
            "k_cache": cache,
            "k_scale_cache": scale,
            "weights": values.normal(rows, problem.num_heads, dtype=torch.float32, size=2.0**-9),
            "block_table": table,
            "seq_lens": values.integers(batch.kv_lens),
            "max_seq_len": max(batch.max_kv_len, *batch.kv_lens),
        }

    return call


def topk_indices_calls(problem: TopKProblem, sizes: Sizes, values: Values) -> Calls:
    """Rows of logits: of a prefill with starts, of a decode step with ends alone. `sizes`: ``columns``, at least."""

    def call(batch: Batch) -> Arguments:
        starts, ends = _ranges(batch)
        columns = sum(batch.kv_lens)
        if not problem.row_starts:
            ends = [end - start for start, end in zip(starts, ends, strict=True)]
            columns = batch.max_kv_len
        columns = max(columns, sizes.get("columns", 0), *ends)
        made: Arguments = {
            "logits": values.normal(batch.tokens, columns, dtype=torch.float32),
            "k": problem.k,
        }
        if problem.row_starts:
            made["row_starts"] = values.integers(starts)
        if problem.row_ends:
            made["row_ends"] = values.integers(ends)
        return made

    return call


def _ranges(batch: Batch) -> tuple[list[int], list[int]]:
    """The first key of each new token and the one after its last, for consecutive sequences."""
    starts: list[int] = []
    ends: list[int] = []
    begin = 0
    for q_len, kv_len in zip(batch.q_lens, batch.kv_lens, strict=True):
        starts += [begin] * q_len
        ends += range(begin + kv_len - q_len + 1, begin + kv_len + 1)
        begin += kv_len
    return starts, ends
