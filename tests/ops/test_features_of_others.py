"""What other libraries take and we do not (docs/features.md): the call names it, whichever way it is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument

z = torch.zeros
BF16, E4M3, E5M2, U8, I32 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int32


def attention(**changes: Any) -> Any:
    q, k = z(2, 6, 4, 32, dtype=BF16), z(2, 8, 2, 32, dtype=BF16)
    return kernelhub.attention(**{"q": q, "k": k, "v": k} | changes)


def paged_attention(**changes: Any) -> Any:
    q, cache = z(2, 4, 32, dtype=BF16), z(3, 16, 2, 32, dtype=BF16)
    call = {"q": q, "k_cache": cache, "v_cache": cache, "block_table": z(2, 1, dtype=I32), "seq_lens": z(2, dtype=I32)}
    return kernelhub.paged_attention(**call | changes)


def mla_attention(**changes: Any) -> Any:
    call = {"q": z(2, 8, 80, dtype=BF16), "kv_cache": z(3, 16, 80, dtype=BF16), "scale": 1.0, "value_dim": 64}
    return kernelhub.mla_attention(**call | {"block_table": z(2, 1, dtype=I32), "seq_lens": z(2, dtype=I32)} | changes)


def grouped_gemm(**changes: Any) -> Any:
    call = {"a": z(4, 256).to(E4M3), "b": z(2, 300, 256).to(E4M3), "offsets": torch.tensor([2, 4], dtype=I32)}
    return kernelhub.grouped_gemm(**call | {"a_scale": z(4, 2), "b_scale": z(2, 3, 2)} | changes)


def fused_moe(**changes: Any) -> Any:
    call = {"x": z(4, 256, dtype=BF16), "w13": z(4, 256, 256, dtype=BF16), "w2": z(4, 256, 128, dtype=BF16)}
    return kernelhub.fused_moe(**call | {"topk_weights": z(4, 2), "topk_ids": z(4, 2, dtype=I32)} | changes)


def mxfp8_experts() -> Any:
    weights = {"w13": z(4, 256, 256).to(E4M3), "w2": z(4, 256, 128).to(E4M3)}
    return fused_moe(**weights, w13_scale=z(4, 256, 8, dtype=U8), w2_scale=z(4, 256, 4, dtype=U8))


def fp4_indexer() -> Any:
    rows = {"q": z(4, 8, 64, dtype=U8), "k": z(16, 64, dtype=U8), "weights": z(4, 8), "k_scale": None}
    return kernelhub.mqa_logits(**rows, cu_seqlen_ks=z(4, dtype=I32), cu_seqlen_ke=z(4, dtype=I32))


TENSORS = [
    ("a causal flag per sequence", lambda: attention(causal=torch.ones(2, dtype=torch.bool)), "causal"),
    ("float8 queries", lambda: attention(q=z(2, 6, 4, 32).to(E4M3)), "q"),
    ("an NVFP4 cache", lambda: paged_attention(k_cache=z(3, 16, 2, 16, dtype=U8)), "k_cache"),
    ("a float8 result", lambda: attention(out=z(2, 6, 4, 32).to(E4M3)), "out"),
    ("scales per token", lambda: paged_attention(
        **dict.fromkeys(("k_cache", "v_cache"), z(3, 16, 2, 32).to(E4M3)), k_scale=z(3, 16, 2), v_scale=z(3, 16, 2)
    ), "k_scale"),
    ("a latent cache of 656 bytes", lambda: mla_attention(kv_cache=z(3, 16, 104, dtype=U8)), "kv_cache"),
    ("a latent cache in e5m2", lambda: mla_attention(kv_cache=z(3, 16, 80).to(E5M2), kv_scale=1.0), "kv_cache"),
    ("FP4 rows of the indexer", fp4_indexer, "q"),
    ("both in e5m2", lambda: kernelhub.bmm_fp8(z(2, 4, 8).to(E5M2), z(2, 6, 8).to(E5M2), z(()), z(())), "b"),
    ("e5m2 in groups", lambda: grouped_gemm(a=z(4, 256).to(E5M2)), "a"),
    ("weights by row block in groups", lambda: grouped_gemm(b_scale=z(2, 300, 2)), "b_scale"),
    ("rows by 128 x 128 in groups", lambda: grouped_gemm(a_scale=z(1, 2)), "a_scale"),
    ("MXFP8 experts", mxfp8_experts, "w13_scale"),
    ("factors of each expert", lambda: fused_moe(activation="swiglu_oai", alpha=z(4)), "alpha"),
    ("limits of each expert", lambda: fused_moe(activation="swiglu_clamped", limit=z(4)), "limit"),
    ("SiTU", lambda: fused_moe(activation="situ"), "activation"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "call", "parameter"), TENSORS, ids=[what for what, *_ in TENSORS])
def test_a_value_that_is_not_taken_is_named_with_what_to_give(what: str, call: Any, parameter: str) -> None:
    with pytest.raises(InvalidArgument, match=r"give|scales are") as caught:
        call()
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("call", "name"),
    [
        *((attention, name) for name in ("attn_mask", "custom_mask", "alibi_slopes", "q_descale", "output_scale")),
        *((paged_attention, name) for name in ("alibi_slopes", "mm_prefix_range", "q_scale", "kv_cache_sf")),
        *((fused_moe, name) for name in ("gemm1_beta", "num_fused_shared_experts")),
    ],
)
def test_a_parameter_of_another_library_is_named(call: Any, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        call(**{name: z(1)})


def test_the_calls_are_right_without_it() -> None:
    for call in (attention, paged_attention, mla_attention, grouped_gemm, fused_moe):
        call()
