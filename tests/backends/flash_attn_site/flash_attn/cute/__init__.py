"""Stand-in for FlashAttention-4: its headers since 4.0.0b27, but for the last parameters."""

from __future__ import annotations

from tests.backends import flash_attn_numbers as numbers


def flash_attn_func(
    q,
    k,
    v,
    qv=None,
    gather_kv_indices=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    return_lse=False,
):
    assert num_splits == 1
    return numbers.fa4(q, k, v, softmax_scale, causal, window_size, learnable_sink, return_lse)


def flash_attn_varlen_func(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    return_lse=False,
):
    assert num_splits == 1
    numbers.check_bounds(cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k)
    places = (cu_seqlens_q, cu_seqlens_k, seqused_k, page_table)
    return numbers.fa4(q, k, v, softmax_scale, causal, window_size, learnable_sink, return_lse, *places)
