"""Calls of the ops of latent attention as serving makes them."""

from __future__ import annotations

import torch

from kernelhub.ops.attention.problem import ONE
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.ops.mla.cache.problem import MlaCacheProblem
from kernelhub.ops.mla.concat.problem import ConcatProblem
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values, kv_scales

_CODE = 2.0**-6  # what a code of a float8 cache counts
_TOPK = 2048
_NOPE, _VALUE = 128, 128


def mla_attention_calls(problem: MlaProblem, sizes: Sizes, values: Values) -> Calls:
    """A step over pages of latents.

    `sizes`: ``nope_dim``, a head's own width before absorption, of which the scale is made; ``topk``, tokens that a
    query of sparse attention sees.
    """
    nope, topk = sizes.get("nope_dim", _NOPE), sizes.get("topk", _TOPK)
    page_bytes = problem.page_size * problem.head_dim * getattr(torch, problem.kv_dtype).itemsize
    features: Arguments = {"scale": (nope + problem.rope_dim) ** -0.5, "value_dim": problem.value_dim}
    features["causal"] = problem.causal
    if problem.sinks:
        features["sinks"] = values.normal(problem.num_heads, dtype=problem.q_dtype)
    if problem.lse:
        features["return_lse"] = True
    if problem.kv_scale is not None:
        features["kv_scale"] = kv_scales(values, problem.kv_scale, 1, _CODE)

    def call(batch: Batch) -> Arguments:
        num_pages, table = values.pages(batch, problem.page_size, page_bytes)
        rows: tuple[int, ...] = (batch.tokens,)
        made: Arguments = {}
        if problem.ragged:
            made = {"cu_seqlens_q": values.offsets(batch.q_lens), "max_seqlen_q": batch.max_q_len}
        elif problem.q_len != ONE:
            rows = (batch.num_seqs, batch.q_lens[0])
        if problem.sparse:
            shortest = min(batch.kv_lens)
            listed = values.picks(batch.tokens, shortest, min(topk, shortest))
            made["topk_indices"] = torch.nn.functional.pad(listed, (0, topk - listed.shape[1]), value=-1)
            made["topk_indices"] = made["topk_indices"].reshape(*rows, topk)
        return {
            "q": values.normal(*rows, problem.num_heads, problem.head_dim, dtype=problem.q_dtype),
            "kv_cache": values.normal(num_pages, problem.page_size, problem.head_dim, dtype=problem.kv_dtype),
            "block_table": table,
            "seq_lens": values.integers(batch.kv_lens),
            **made,
            **features,
        }

    return call


def write_mla_cache_calls(problem: MlaCacheProblem, sizes: Sizes, values: Values) -> Calls:
    """New tokens in the form of the down-projection's result, and the pages for them."""
    width = problem.latent_dim + problem.rope_dim
    scale = kv_scales(values, problem.kv_scale, 1, _CODE)

    def call(batch: Batch) -> Arguments:
        projected = values.normal(batch.tokens, width, dtype=problem.dtype)
        num_pages = -(-batch.tokens // problem.page_size) + 1
        made: Arguments = {
            "kv_c": projected[:, : problem.latent_dim],
            "k_rope": projected[:, problem.latent_dim :],
            "kv_cache": values.normal(num_pages, problem.page_size, width, dtype=problem.kv_dtype),
            "slot_mapping": values.order(num_pages * problem.page_size)[: batch.tokens],
        }
        return made if scale is None else made | {"kv_scale": scale}

    return call


def concat_mla_k_calls(problem: ConcatProblem, sizes: Sizes, values: Values) -> Calls:
    """Keys of new tokens, a view of the up-projection's result. `sizes`: ``v_head_dim``, the gap between them."""
    beside = sizes.get("v_head_dim", _VALUE)

    def call(batch: Batch) -> Arguments:
        kv = values.normal(batch.tokens, problem.num_heads, problem.nope_dim + beside, dtype=problem.dtype)
        k_rope = values.normal(batch.tokens, 1, problem.rope_dim, dtype=problem.dtype)
        return {"k_nope": kv[..., : problem.nope_dim], "k_rope": k_rope}

    return call
