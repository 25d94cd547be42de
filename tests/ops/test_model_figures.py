"""The figures that inputs state of published models are those of transformers' configurations.

A class is here if its defaults, in what is compared, are the figures of the published checkpoint; those of
MiniMaxConfig, say, are not MiniMax-Text-01's.
"""

from __future__ import annotations

from typing import Any

import pytest

from kernelhub.ops.models.shapes import ABSORBED, ATTENTION, FP8_LAYERS, GROUPED, INDEXERS, MLA, MOE
from kernelhub.ops.quant.inputs import SHAPES


def config_of(name: str) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: 11 cases")
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}: 1 case")
    return getattr(transformers, name)()


def first(config: Any, *names: str) -> Any:
    """The figure by whichever name this transformers has it."""
    return next(value for name in names if (value := getattr(config, name, None)) is not None)


EXPERTS = [
    ("MixtralConfig", "mixtral-8x7b"),
    ("Qwen3MoeConfig", "qwen3-30b-a3b"),
    ("DeepseekV3Config", "deepseek-v3.2"),
    ("GlmMoeDsaConfig", "glm-5"),
    ("MiniMaxM2Config", "minimax-m2.5"),
    ("GptOssConfig", "gpt-oss-120b"),
]


@pytest.mark.parametrize(("name", "model"), EXPERTS, ids=[model for _, model in EXPERTS])
def test_experts_are_those_of_the_configuration(name: str, model: str) -> None:
    config, stated = config_of(name), MOE[model]
    width = first(config, "moe_intermediate_size", "intermediate_size")
    experts = first(config, "n_routed_experts", "num_local_experts", "num_experts")
    figures = (config.hidden_size, width, experts, config.num_experts_per_tok)
    assert (stated.hidden_size, stated.intermediate_size, stated.num_experts, stated.top_k) == figures
    assert stated.scaling_factor == getattr(config, "routed_scaling_factor", 1.0)
    groups = getattr(config, "n_group", 1), getattr(config, "topk_group", 1)
    assert (stated.num_groups, stated.topk_groups) == groups
    if model in GROUPED:
        grouped = GROUPED[model]
        assert (grouped.hidden, grouped.intermediate, grouped.num_experts, grouped.top_k) == figures
    if model in SHAPES:
        assert SHAPES[model][1] == config.hidden_size


@pytest.mark.parametrize(("name", "model"), [("DeepseekV32Config", "deepseek-v3.2"), ("GlmMoeDsaConfig", "glm-5")])
def test_latent_attention_and_indexer_are_those_of_the_configuration(name: str, model: str) -> None:
    config, latent, indexer = config_of(name), MLA[model], INDEXERS[model]
    assert latent.num_heads == config.num_attention_heads
    assert (latent.kv_lora_rank, latent.qk_rope_head_dim) == (config.kv_lora_rank, config.qk_rope_head_dim)
    assert latent.qk_nope_head_dim == config.qk_nope_head_dim
    assert latent.index_topk == indexer.k == config.index_topk
    assert (indexer.num_heads, indexer.head_dim) == (config.index_n_heads, config.index_head_dim)
    into, back = ABSORBED[f"{model} q to latent"], ABSORBED[f"{model} latent to v"]
    assert (into.heads, into.n, into.k) == (config.num_attention_heads, config.kv_lora_rank, config.qk_nope_head_dim)
    assert (back.heads, back.n, back.k) == (config.num_attention_heads, config.v_head_dim, config.kv_lora_rank)
    out = FP8_LAYERS[f"{model} o"]
    assert (out.n, out.k) == (config.hidden_size, config.num_attention_heads * config.v_head_dim)


@pytest.mark.parametrize(
    ("name", "model"),
    [("MistralConfig", "mistral-7b-v0.1"), ("Qwen3MoeConfig", "qwen3-30b-a3b"), ("GptOssConfig", "gpt-oss-120b")],
)
def test_attention_is_that_of_the_configuration(name: str, model: str) -> None:
    config, stated = config_of(name), ATTENTION[model]
    assert (stated.num_q_heads, stated.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    if getattr(config, "head_dim", None) is not None:
        assert stated.head_dim_qk == stated.head_dim_vo == config.head_dim
    sliding = getattr(config, "sliding_window", None)
    assert stated.window == (None if sliding is None else sliding - 1)
