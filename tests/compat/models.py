"""Small models of Hugging Face transformers with random weights, and English text for them, a token per byte.

Weights are large enough that attention is sharp: what a kernel leaves out shows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from kernelhub.compat.transformers import register
from tests.conftest import DEVICE

installed = Version(transformers.__version__)

PAD, BOS, EOS = 256, 257, 258
TEXTS = (
    "The kettle began to sing, and nobody in the kitchen moved.",
    "It was the first cold morning of the year, and the milk had frozen on the step.",
    "Whoever came up the path would have to knock.",
)
LAYERS = 2
WINDOW = 16  # tokens: a text has several times as many
ALL = 500

SIZES = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
SCALED = {"head_dim": 16, "query_pre_attn_scalar": 40, "sliding_window": WINDOW}
LOCAL_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
QWEN2_EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture, small.

    Attributes:
        model: name of its class in transformers.
        sizes: its configuration, beside `SIZES`.
        config: name of the configuration's class, if it is not that of the model.
        kernel: what answers a prompt on the CPU.
        problem: what kernels are told of one layer or more.
        without: by feature, the configuration that lacks it; "sinks" is the value of all sinks.
    """

    model: str
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: str | None = None
    kernel: str = "torch.packed"
    problem: dict[str, Any] = dataclasses.field(default_factory=dict)
    without: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


DECODERS = {
    "llama": Family("LlamaForCausalLM", problem={"num_q_heads": 4, "num_kv_heads": 2}),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"num_attention_heads": 6, "head_dim": 16},
        problem={"num_q_heads": 6, "num_kv_heads": 2},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {"sliding_window": WINDOW},
        problem={"window_left": True},
        without={"window": {"sliding_window": ALL}},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {**SCALED, **LOCAL_AND_FULL, "attn_logit_softcapping": 2.0},
        kernel="cpp.split_kv",
        problem={"softcap": True, "window_left": True},
        without={"softcap": {"attn_logit_softcapping": None}, "window": {"sliding_window": ALL}},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {"head_dim": 16, "sliding_window": WINDOW, **LOCAL_AND_FULL, "num_local_experts": 4, "num_experts_per_tok": 2},
        problem={"sinks": True, "window_left": True},
        without={"sinks": {"sinks": -1e9}, "window": {"sliding_window": ALL}},
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", LATENT, kernel="cpp.split_kv", problem={"head_dim_qk": 24, "head_dim_vo": 16}
    ),
}
FAMILIES = {
    **DECODERS,
    "llama4": Family(
        "Llama4ForCausalLM",
        {
            "head_dim": 16,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
        },
        "Llama4TextConfig",
    ),
    "gemma3": Family("Gemma3TextModel", {**SCALED, **LOCAL_AND_FULL, "use_bidirectional_attention": True}),
    "bert": Family("BertForMaskedLM"),
    "modern_bert": Family("ModernBertForMaskedLM", {"local_attention": WINDOW, "global_attn_every_n_layers": 2}),
    "t5gemma": Family("T5GemmaForConditionalGeneration"),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": LAYERS, **QWEN2_EXPERTS},
    ),
    "doge": Family("DogeForCausalLM"),
}


@functools.cache
def build(name: str, sinks: float | None = None, **changes: Any) -> Any:
    """The model of a family, made once; its weights are the same whatever the changes."""
    register()
    family = FAMILIES[name]
    model_class = getattr(transformers, family.model)
    config_class = getattr(transformers, family.config) if family.config else model_class.config_class
    sizes = SIZES | family.sizes | changes
    if name == "t5gemma":
        half = SIZES | SCALED | LOCAL_AND_FULL
        sizes = {"encoder": half, "decoder": half | {"cross_attention_hidden_size": 64}, "vocab_size": 259}
    torch.manual_seed(0)
    model = model_class._from_config(config_class(**sizes), attn_implementation="eager")
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
            if sinks is not None:
                torch.nn.init.constant_(parameter, sinks)
        elif parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval().to(DEVICE)


def by(implementation: str, model: Any, call: Callable[[Any], Any]) -> Any:
    """What a call of the model gives with an attention implementation."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return call(model)


def tokens(text: str) -> Tensor:
    """[1, bytes]"""
    return torch.tensor([list(text.encode())], device=DEVICE)


def batch(side: str) -> tuple[Tensor, Tensor]:
    """All texts padded on one side, int64 [3, bytes of the longest]; and 1 where there is text, 0 elsewhere."""
    rows = [tokens(text)[0] for text in TEXTS]
    ids = torch.full((len(rows), max(map(len, rows))), PAD, device=DEVICE)
    for i, row in enumerate(rows):
        columns = slice(0, len(row)) if side == "right" else slice(ids.shape[1] - len(row), None)
        ids[i, columns] = row
    return ids, (ids != PAD).long()
