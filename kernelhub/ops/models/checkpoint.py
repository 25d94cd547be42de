"""A model's description from its Hugging Face config.json.

Names of fields are those that transformers and the modeling code beside the checkpoints read. An architecture that is
not listed here is an error, since a guess would list wrong problems and miss needed ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kernelhub.dispatch.settings import did_you_mean
from kernelhub.errors import ConfigurationError
from kernelhub.ops.models.description import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP4,
    MXINT4,
    NVFP4,
    PLAIN,
    Attention,
    Description,
    Experts,
    Indexer,
    LatentAttention,
)
from kernelhub.probes.document import difference

Config = Mapping[str, Any]

_FIGURES = (
    "first_k_dense_replace", "head_dim", "hidden_size", "index_head_dim", "index_n_heads", "index_topk",
    "intermediate_size", "kv_lora_rank", "moe_intermediate_size", "n_group", "n_routed_experts", "n_shared_experts",
    "num_attention_heads", "num_experts", "num_experts_per_tok", "num_key_value_heads", "num_local_experts",
    "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "shared_expert_intermediate_size", "sliding_window",
    "topk_group", "v_head_dim",
)  # fmt: skip
_NEVER_NULL = (
    "hidden_size", "kv_lora_rank", "num_attention_heads", "num_experts_per_tok", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
_SCHEMA = {f"{name}?": (None, int) for name in _FIGURES} | {
    **dict.fromkeys((f"{name}?" for name in _NEVER_NULL), int),
    "model_type?": (None, str),
    "layer_types?": (None, [str]),
    "quantization_config?": (None, {str: Any}),
    "routed_scaling_factor?": (None, float),
    "attn_logit_softcapping?": (None, float),
}


def description_of(name: str, config: Config) -> Description:
    """The description of the model of a config.json.

    Args:
        name: for messages: a model's, or the file's.
        config: the file's contents.

    Raises:
        ConfigurationError: an architecture that is not known here, a field that is missing, a quantisation that no
            op takes.
    """
    wrong = difference(config, _SCHEMA, "config.json")
    if wrong:
        raise ConfigurationError(f"{name}: {wrong}; take the file as it was published")
    kind = config.get("model_type")
    if kind is None and isinstance(config.get("architectures"), list):
        raise ConfigurationError(f"{name}: config.json has no model_type; its architectures are not enough")
    if isinstance(config.get("text_config"), Mapping) and kind not in _READERS:
        return description_of(name, {"quantization_config": config.get("quantization_config"), **config["text_config"]})
    if kind not in _READERS:
        known = ", ".join(_READERS)
        raise ConfigurationError(
            f"{name}: architecture {kind!r} is not known{did_you_mean(str(kind), _READERS)}; known are {known}"
        )
    try:
        return _READERS[kind](name, config)
    except KeyError as error:
        raise ConfigurationError(f"{name}: config.json of a {kind} lacks {error}") from None
    except (TypeError, AttributeError, ValueError) as error:  # a figure that is null, or a table that is none
        raise ConfigurationError(f"{name}: config.json of a {kind} has a figure that is none: {error}") from None


def _grouped_heads(name: str, config: Config) -> Description:
    """Llama and those built like it: grouped heads, one gated layer after them."""
    linear, _ = _formats(name, config)
    return Description(
        name,
        config["hidden_size"],
        _attention(config),
        intermediate_size=config["intermediate_size"],
        gated=config["model_type"] not in ("phi",),
        linear=linear,
        bias=bool(config.get("attention_bias", config["model_type"] in ("qwen2", "phi"))),
    )


def _grouped_heads_and_experts(name: str, config: Config) -> Description:
    """Mixtral, Qwen's, MiniMax M2's and gpt-oss's: grouped heads, routed experts after them."""
    kind = config["model_type"]
    linear, experts_held = _formats(name, config)
    experts = Experts(
        _first(config, "num_experts", "num_local_experts", "n_routed_experts"),
        config["num_experts_per_tok"],
        _first(config, "moe_intermediate_size", "intermediate_size"),
        shared_size=config.get("shared_expert_intermediate_size") or 0,
        weights=experts_held,
        **_ROUTING.get(kind, {}),
    )
    if kind in ("qwen2_moe", "qwen3_moe"):
        experts = replace(experts, renormalize=bool(config.get("norm_topk_prob", False)))
    if kind == "glm4_moe":
        experts = replace(experts, **_groups(config), shared_size=_shared(config))
    dense = kind == "glm4_moe" and config.get("first_k_dense_replace", 0) > 0
    dense = dense or bool(config.get("mlp_only_layers"))
    return Description(
        name,
        config["hidden_size"],
        _attention(config),
        intermediate_size=config["intermediate_size"] if dense else 0,
        experts=experts,
        linear=linear,
        bias=bool(config.get("attention_bias", kind in ("qwen2_moe", "gpt_oss"))),
    )


_ROUTING: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "scoring": "softmax_after_topk",
        "renormalize": False,
        "activation": "swiglu_oai",
        "bias": True,
    },
    "minimax_m2": {"scoring": "sigmoid", "correction_bias": True},
    "glm4_moe": {"scoring": "sigmoid", "correction_bias": True},
}


def _latent(name: str, config: Config) -> Description:
    """DeepSeek-V2 and after, Kimi K2, GLM-5: latent attention, dense layers first, then experts beside a shared one."""
    linear, experts_held = _formats(name, config)
    indexer = None
    if config.get("index_topk") and config["q_lora_rank"] is None:
        raise TypeError("q_lora_rank is null, and its indexer reads queries of that rank")
    if config.get("index_topk"):
        indexer = Indexer(config["index_n_heads"], config["index_head_dim"], config["index_topk"])
    sigmoid = config.get("scoring_func", "sigmoid" if config["model_type"] != "deepseek_v2" else "softmax") == "sigmoid"
    experts = None
    if config.get("n_routed_experts"):
        experts = Experts(
            config["n_routed_experts"],
            config["num_experts_per_tok"],
            config["moe_intermediate_size"],
            shared_size=_shared(config),
            scoring="sigmoid" if sigmoid else "softmax",
            correction_bias=sigmoid,
            weights=experts_held,
            **_groups(config),
        )
    dense = experts is None or config.get("first_k_dense_replace", 0) > 0
    return Description(
        name,
        config["hidden_size"],
        LatentAttention(
            config["num_attention_heads"],
            config["q_lora_rank"],
            config["kv_lora_rank"],
            config["qk_rope_head_dim"],
            config["qk_nope_head_dim"],
            config["v_head_dim"],
            indexer,
        ),
        intermediate_size=config["intermediate_size"] if dense else 0,
        experts=experts,
        linear=linear,
    )


_READERS: dict[str, Callable[[str, Config], Description]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi"), _grouped_heads),
    **dict.fromkeys(
        ("mixtral", "qwen2_moe", "qwen3_moe", "minimax_m2", "gpt_oss", "glm4_moe"), _grouped_heads_and_experts
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa"), _latent),
}


def _attention(config: Config) -> Attention:
    num_heads, windowed = config["num_attention_heads"], _windowed(config)
    return Attention(
        num_heads,
        config.get("num_key_value_heads") or num_heads,
        config.get("head_dim") or config["hidden_size"] // num_heads,
        windowed=windowed,
        window=config["sliding_window"] - 1 if True in windowed else 0,
        softcap=config.get("attn_logit_softcapping") or None,
        sinks=config["model_type"] == "gpt_oss",
    )


def _windowed(config: Config) -> tuple[bool, ...]:
    """The kinds of layer there are. Gemma 2 and gpt-oss alternate, also where config.json lists no layers."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return (False,)
    kinds = config.get("layer_types")
    if kinds:
        return tuple(sorted({kind == "sliding_attention" for kind in kinds}))
    return (False, True) if config["model_type"] in ("gemma2", "gpt_oss") else (True,)


def _groups(config: Config) -> dict[str, Any]:
    grouped = config.get("topk_method") != "greedy" and config.get("n_group") and config["n_group"] > 1
    return {
        "num_groups": config["n_group"] if grouped else 1,
        "topk_groups": config["topk_group"] if grouped else 1,
        "renormalize": bool(config.get("norm_topk_prob", False)),
        "scaling_factor": float(config.get("routed_scaling_factor", 1.0)),
    }


def _shared(config: Config) -> int:
    width: int = config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0)
    return width


def _formats(name: str, config: Config) -> tuple[str, str]:
    """The formats of the weights of linear layers and of experts, from ``quantization_config``."""
    said = config.get("quantization_config")
    if not said:
        return PLAIN, PLAIN
    method = said.get("quant_method")
    if method == "fp8":
        held = FP8_BLOCK if said.get("weight_block_size") else FP8_TENSOR
        if said.get("weight_block_size") not in (None, [128, 128]):
            raise ConfigurationError(f"{name}: fp8 in blocks of {said['weight_block_size']}; ops take [128, 128]")
        return held, held
    if method == "mxfp4":  # gpt-oss: its experts alone
        return PLAIN, MXFP4
    if method == "modelopt" and said.get("quant_algo") in ("FP8", "NVFP4"):
        return (NVFP4, NVFP4) if said["quant_algo"] == "NVFP4" else (FP8_TENSOR, FP8_TENSOR)
    if method == "compressed-tensors":
        if _integers_of_experts(said):  # Kimi K2 Thinking
            return PLAIN, MXINT4
        held = _compressed(said)
        if held:
            return held, held
    raise ConfigurationError(
        f"{name}: weights quantised by {method!r} ({said.get('quant_algo') or said.get('format') or 'no format'}) are "
        "those of no op here; quantization='plain' lists what the model needs beside them"
    )


def _compressed(said: Config) -> str:
    """The format of compressed-tensors' first group of layers; empty if no op takes it."""
    groups = said.get("config_groups") or {}
    weights = next((group.get("weights") or {} for group in groups.values()), {})
    if weights.get("type") != "float":
        return ""
    if weights.get("num_bits") == 4:
        return NVFP4 if weights.get("group_size") == 16 else ""
    strategies = {"tensor": FP8_TENSOR, "channel": FP8_CHANNEL, "block": FP8_BLOCK}
    return strategies.get(weights.get("strategy", ""), "") if weights.get("num_bits") == 8 else ""


# Linear layers beside the routed experts, of a decoder with either attention.
_BESIDE = (
    *(f"model.layers.1.self_attn.{name}" for name in ("q_proj", "q_b_proj", "kv_b_proj", "o_proj")),
    *(f"model.layers.{place}.down_proj" for place in ("0.mlp", "1.mlp.shared_experts")),
)


def _integers_of_experts(said: Config) -> bool:
    """Whether compressed-tensors holds experts, and nothing else, as signed integers of 4 bits by 32 columns."""
    groups = list((said.get("config_groups") or {}).values())
    weights = groups[0].get("weights") or {} if len(groups) == 1 else {}
    fits = (weights.get("type"), weights.get("num_bits"), weights.get("group_size")) == ("int", 4, 32)
    if not fits or not weights.get("symmetric", True) or weights.get("actorder"):
        return False
    if groups[0].get("input_activations"):
        return False
    ignored = [str(name) for name in said.get("ignore") or ()]

    def left_out(layer: str) -> bool:
        return any(re.match(name[3:], layer) if name.startswith("re:") else name == layer for name in ignored)

    return all(left_out(layer) for layer in _BESIDE)


def _first(config: Config, *names: str) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise KeyError(" or ".join(names))
