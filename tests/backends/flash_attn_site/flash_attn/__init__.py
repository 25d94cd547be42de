"""Stand-in for FlashAttention-2: its headers of 2.7 and 2.8."""

from __future__ import annotations

from tests.backends import flash_attn_numbers as numbers


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    out, lse = numbers.fa2(q, k, v, softmax_scale, causal, window_size, softcap, k.shape[1])
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    numbers.check_bounds(cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k)
    if max_seqlen_q == 1:
        assert q.shape[0] == cu_seqlens_q.shape[0] - 1, "heads are taken for queries: one query in each sequence"
    if block_table is not None:
        numbers.check_lse_ends(q, cu_seqlens_q, max_seqlen_q, cu_seqlens_k.diff().tolist())
    out, lse = numbers.fa2(
        q, k, v, softmax_scale, causal, window_size, softcap, max_seqlen_k, cu_seqlens_q, cu_seqlens_k, block_table
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    assert num_splits == 1, "the library's own number of splits gives NaN over pages now and then"
    offsets = numbers.offsets(cache_seqlens)
    bound = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    out, lse = numbers.fa2(
        q, k_cache, v_cache, softmax_scale, causal, window_size, softcap, bound, None, offsets, block_table
    )
    return (out, lse) if return_softmax_lse else out
