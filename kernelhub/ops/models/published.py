"""Published models by name: the fields of their config.json that matter to kernels.

`describe` reads them, and `shapes` has them as the inputs of ops take them. tests/ops/test_model_figures.py compares
them with transformers' configurations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernelhub.dispatch.settings import did_you_mean
from kernelhub.errors import ConfigurationError
from kernelhub.ops.models.checkpoint import description_of
from kernelhub.ops.models.description import EXPERTS_ALONE, FORMATS, Description
from kernelhub.probes import document

Model = str | Path | Description

_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "quantization_config": _BLOCKS,
}


def _heads(kind: str, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        **more,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _heads("llama", 4096, 14336, 32, 8, 128),
    "llama-3.1-70b": _heads("llama", 8192, 28672, 64, 8, 128),
    "mistral-7b-v0.1": _heads("mistral", 4096, 14336, 32, 8, 128, sliding_window=4096),
    "gemma-2-9b": _heads("gemma2", 3584, 14336, 16, 8, 256, sliding_window=4096, attn_logit_softcapping=50.0),
    "phi-2": _heads("phi", 2560, 10240, 32, 32, 80),
    "mixtral-8x7b": _heads("mixtral", 4096, 14336, 32, 8, 128, num_local_experts=8, num_experts_per_tok=2),
    "qwen3-30b-a3b": _heads(
        "qwen3_moe",
        2048,
        6144,
        32,
        4,
        128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "gpt-oss-120b": _heads(
        "gpt_oss",
        2880,
        2880,
        64,
        8,
        64,
        num_local_experts=128,
        num_experts_per_tok=4,
        sliding_window=128,
        quantization_config={"quant_method": "mxfp4"},
    ),
    "minimax-m2.5": _heads(
        "minimax_m2", 3072, 1536, 48, 8, 128, num_local_experts=256, num_experts_per_tok=8, quantization_config=_BLOCKS
    ),
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    "deepseek-v2": {
        **_DEEPSEEK_V3,
        "model_type": "deepseek_v2",
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 2,
        "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 16.0,
        "first_k_dense_replace": 1,
        "quantization_config": None,
    },
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v3.2": {
        **_DEEPSEEK_V3,
        "model_type": "deepseek_v32",
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    "kimi-k2": {
        **_DEEPSEEK_V3,
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "first_k_dense_replace": 1,
    },
    "kimi-k2-thinking": {
        **_DEEPSEEK_V3,
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "first_k_dense_replace": 1,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "weights": {"type": "int", "num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True},
                }
            },
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            ],
        },
    },
    "glm-5": {
        **_DEEPSEEK_V3,
        "model_type": "glm_moe_dsa",
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_attention_heads": 64,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
}


def describe(model: Model, quantization: str | None = None) -> Description:
    """A model's description.

    Args:
        model: a name of `CONFIGS`, the path of a Hugging Face config.json or of a folder with one, or a description.
        quantization: format of the weights, one of `FORMATS`, in place of that of config.json.

    Raises:
        ConfigurationError: no such model or file, or one that is not understood.
    """
    if quantization is not None and quantization not in FORMATS:
        meant = did_you_mean(quantization, FORMATS)
        raise ConfigurationError(f"quantization is {quantization!r}{meant}; it takes {', '.join(FORMATS)}")
    if not isinstance(model, str | Path | Description):
        raise ConfigurationError(
            f"model is {model!r}; give a name such as 'llama-3.1-8b', or the path of a config.json or of a checkpoint"
        )
    if isinstance(model, Description):
        found = model
    else:
        config = _config(model)
        if quantization is not None:
            config = {**config, "quantization_config": None}
        found = description_of(str(model), config)
    if quantization is None:
        return found
    experts = found.experts and replace(found.experts, weights=quantization)
    return replace(found, linear="plain" if quantization in EXPERTS_ALONE else quantization, experts=experts)


def unknown(model: str, more: Iterable[str] = ()) -> ConfigurationError:
    """The error for a name that no model has; `more` are names that are known beside `CONFIGS`."""
    known = tuple(dict.fromkeys((*CONFIGS, *more)))
    return ConfigurationError(
        f"model {model!r} is neither known{did_you_mean(model, known)} nor a file; known are {', '.join(known)}, "
        "and every config.json of a known architecture"
    )


def _config(model: str | Path) -> dict[str, Any]:
    if isinstance(model, str) and model in CONFIGS:
        return CONFIGS[model]
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            raise ConfigurationError(f"model {model}: the folder has no config.json; name the folder of a checkpoint")
    try:
        config = document.read(path, finite=False)
    except FileNotFoundError:
        raise unknown(str(model)) from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model {path}: cannot be read as a config.json: {error}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"model {path}: a config.json is an object, not {type(config).__name__}")
    return config
