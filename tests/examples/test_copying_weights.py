"""benchmarks/copying_weights.py: its model repeats the context, and a fault in attention changes that."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
}
DISTANCES = (60, 7, 33, 3)
VOCABULARY, TOKENS, WIDE = 1000, 160, 256


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("copying_weights")
    sys.path.remove(str(BENCHMARKS))
    sys.modules.pop("copying_weights", None)


class Model(torch.nn.Module):
    """Llama or Qwen3 with vLLM's fused parameters, for one sequence."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        heads, width = config.num_attention_heads + 2 * config.num_key_value_heads, config.head_dim
        hidden = config.hidden_size
        sizes = dict.fromkeys(["model.embed_tokens.weight", "lm_head.weight"], (VOCABULARY, hidden))
        sizes["model.norm.weight"] = (hidden,)
        for layer in range(config.num_hidden_layers):
            sizes |= {
                f"model.layers.{layer}.{name}.weight": size
                for name, size in {
                    "input_layernorm": (config.hidden_size,),
                    "self_attn.qkv_proj": (heads * width, config.hidden_size),
                    "self_attn.o_proj": (config.hidden_size, config.num_attention_heads * width),
                    "mlp.gate_up_proj": (2 * WIDE, config.hidden_size),
                    "mlp.down_proj": (config.hidden_size, WIDE),
                }.items()
            }
            if "Qwen3" in config.architectures[0]:
                sizes |= {f"model.layers.{layer}.self_attn.{name}_norm.weight": (width,) for name in "qk"}
        self.sizes = sizes
        self.held = {name: torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for name, size in sizes.items()}

    def named_parameters(self, *given: Any, **named: Any) -> Iterator[Any]:
        yield from self.held.items()

    def forward(self, ids: Tensor, visible: Tensor, scale: float = 1.0) -> Tensor:
        config, held = self.config, self.held
        q_size, kv_size = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        x = held["model.embed_tokens.weight"][ids]
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}."
            y = normed(x) @ held[at + "self_attn.qkv_proj.weight"].T
            q, k, v = (part.view(len(ids), -1, config.head_dim) for part in y.split([q_size, kv_size, kv_size], -1))
            if "Qwen3" in config.architectures[0]:
                q, k = (normed(part) * held[f"{at}self_attn.{name}_norm.weight"] for part, name in ((q, "q"), (k, "k")))
            q, k = turned(q), turned(k)
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale / math.sqrt(config.head_dim)
            weights = scores.masked_fill(~visible, -1e30).softmax(-1)
            out = torch.einsum("hqk,khd->qhd", weights, v.float()).bfloat16()
            x = x + out.flatten(1) @ held[at + "self_attn.o_proj.weight"].T
            gate, up = (normed(x) @ held[at + "mlp.gate_up_proj.weight"].T).chunk(2, -1)
            x = x + (torch.nn.functional.silu(gate) * up) @ held[at + "mlp.down_proj.weight"].T
        return (normed(x) @ held["lm_head.weight"].T).float()


def normed(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-5)


def turned(x: Tensor) -> Tensor:
    frequencies = 500000.0 ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    angle = (torch.arange(len(x))[:, None] * frequencies)[:, None]
    one, other = x.float().chunk(2, dim=-1)
    return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1).to(x.dtype)


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM"])
def model(bench, request) -> Callable[..., Tensor]:
    config = SimpleNamespace(**CONFIG | {"architectures": [request.param]})
    made = Model(config)
    bench.copying_weights(made, bench.Shape(config, DISTANCES))
    return made


@torch.inference_mode()
def test_the_best_token_is_one_of_the_context_and_a_fault_changes_it(model) -> None:
    ids = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    right = model(ids, causal).argmax(-1)

    def copied(distance: int) -> float:
        return (right[60:] == ids[60 - distance : TOKENS - distance]).float().mean().item()

    assert copied(60) > 0.5
    assert sum(copied(distance) for distance in DISTANCES) > 0.85  # chance combines some of them into another token

    def kept(visible: Tensor, scale: float = 1.0) -> float:
        return (model(ids, visible, scale).argmax(-1) == right)[80:].float().mean().item()

    assert kept(causal, 1.001) >= 0.98  # scores of another rounding
    assert kept(causal & ~causal.tril(-48)) < 0.5  # a window of 48 tokens
    lost = causal.clone()
    lost[:, 32:48] = False  # a page of 16 tokens: the keys of 16 of the 80 tokens at distance 60
    assert kept(lost | torch.eye(TOKENS, dtype=torch.bool)) < 0.9


def gpt_oss(bench: Any, distances: tuple[int, ...]) -> Any:
    """transformers' gpt-oss with the weights that vLLM's model would have, in float32."""
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    sizes = {name: CONFIG[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")}
    layers, experts = 8, 4
    config = transformers.GptOssConfig(
        **sizes,
        num_hidden_layers=layers,
        num_local_experts=experts,
        num_experts_per_tok=2,
        intermediate_size=WIDE,
        vocab_size=VOCABULARY,
        sliding_window=40,
        rope_parameters=rope | {"original_max_position_embeddings": 4096, "rope_theta": 150000.0},
        architectures=["GptOssForCausalLM"],
        attn_implementation="eager",
    )
    model, shape = transformers.GptOssForCausalLM(config).eval(), bench.Shape(config, distances)
    held = dict(model.named_parameters())

    def made(name: str, *size: int) -> Tensor:
        return bench.parameter(name, torch.empty(size), shape)

    heads, kv_heads, width, hidden = (
        sizes[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    )
    rows = [heads * width, kv_heads * width, kv_heads * width]
    with torch.no_grad():
        for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
            held[name].copy_(made(name.replace("embed_tokens", "embedding"), *held[name].shape))
        for at in (f"model.layers.{layer}." for layer in range(layers)):
            fused = made(f"{at}attn.qkv_proj.weight", sum(rows), hidden).split(rows)
            for letter, weight in zip("qkv", fused, strict=True):
                held[f"{at}self_attn.{letter}_proj.weight"].copy_(weight)
                held[f"{at}self_attn.{letter}_proj.bias"].copy_(made(f"{at}attn.qkv_proj.bias", len(weight)))
            held[f"{at}self_attn.o_proj.weight"].copy_(made(f"{at}attn.o_proj.weight", hidden, heads * width))
            held[f"{at}self_attn.o_proj.bias"].copy_(made(f"{at}attn.o_proj.bias", hidden))
            held[f"{at}self_attn.sinks"].copy_(made(f"{at}attn.sinks", heads))
            for name in ("input_layernorm", "post_attention_layernorm"):
                held[f"{at}{name}.weight"].copy_(made(f"{at}{name}.weight", hidden))
            held[f"{at}mlp.router.weight"].copy_(made(f"{at}mlp.router.weight", experts, hidden))
            held[f"{at}mlp.router.bias"].copy_(made(f"{at}mlp.router.bias", experts))
            expert = f"{at}mlp.experts.routed_experts."
            up, down = (
                made(f"{expert}w13_weight", experts, 2 * WIDE, hidden),
                made(f"{expert}w2_weight", experts, hidden, WIDE),
            )
            held[f"{at}mlp.experts.gate_up_proj"].copy_(up.mT)
            held[f"{at}mlp.experts.down_proj"].copy_(down.mT)
            held[f"{at}mlp.experts.gate_up_proj_bias"].copy_(made(f"{expert}w13_bias", experts, 2 * WIDE))
            held[f"{at}mlp.experts.down_proj_bias"].copy_(made(f"{expert}w2_bias", experts, hidden))
    return model


@torch.inference_mode()
def test_gpt_oss_repeats_its_context_by_windows_full_layers_and_sinks(bench) -> None:
    distances = 33, 60, 3, 7  # the layers at even places see 40 tokens
    model = gpt_oss(bench, distances)
    ids = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))

    def logits() -> Tensor:
        return model(ids[None]).logits[0, 80:].float()

    right = logits()
    best = right.argmax(-1)
    at = torch.arange(80, TOKENS)
    copied = [(best == ids[at - distance]).float().mean().item() for distance in distances]
    assert copied[1] > 0.5
    assert sum(copied) > 0.85
    for layer in model.model.layers:
        layer.self_attn.sinks.fill_(-1e4)
    lost = logits()
    assert (lost.argmax(-1) == best).float().mean() > 0.8
    assert (lost.log_softmax(-1).max(-1).values - right.log_softmax(-1).max(-1).values).abs().mean() > 0.02


@torch.inference_mode()
def test_gemma_2_repeats_its_context_by_windows_full_layers_and_a_softcap(bench) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {name: CONFIG[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")}
    config = transformers.Gemma2Config(
        **sizes,
        head_dim=128,
        num_hidden_layers=8,
        intermediate_size=WIDE,
        vocab_size=VOCABULARY,
        query_pre_attn_scalar=128,
        sliding_window=40,
        layer_types=["sliding_attention", "full_attention"] * 4,
        architectures=["Gemma2ForCausalLM"],
        attn_implementation="eager",
    )
    model, distances = transformers.Gemma2ForCausalLM(config).eval(), (33, 60, 3, 7)
    shape = bench.Shape(config, distances)
    rows = [shape.heads * shape.width, shape.kv_heads * shape.width, shape.kv_heads * shape.width]
    for name, weight in model.named_parameters():
        at, _, kind = name.removesuffix(".weight").rpartition(".")
        layer = next((int(part) for part in name.split(".") if part.isdigit()), 0)
        if kind in ("q_proj", "k_proj", "v_proj"):
            made = bench.qkv(layer, shape, weight.device).split(rows)["qkv".index(kind[0])]
        elif kind in ("gate_proj", "up_proj"):
            whole = bench.parameter(f"{at}.gate_up_proj.weight", torch.empty(2 * WIDE, shape.hidden), shape)
            made = whole[:WIDE] if kind == "gate_proj" else whole[WIDE:]
        else:
            made = bench.parameter(name, weight, shape)
        weight.copy_(made)
    ids = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))

    def logits() -> Tensor:
        return model(ids[None]).logits[0, 80:].float()

    right = logits()
    best, at = right.argmax(-1), torch.arange(80, TOKENS)
    assert (best == ids[at - distances[0]]).float().mean() > 0.9
    for each in model.model.layers:
        each.self_attn.attn_logit_softcapping = None
    lost = logits()
    assert (lost.argmax(-1) == best).float().mean() > 0.9, "the softcap leaves a margin"
    assert (lost.log_softmax(-1).max(-1).values - right.log_softmax(-1).max(-1).values).abs().mean() > 1e-3


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 384,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}


def deepseek(bench: Any, query_rank: int | None) -> Any:
    """transformers' DeepSeek V3 with the weights that vLLM's model would have, in float32."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(
        **DEEPSEEK | {"q_lora_rank": query_rank},
        first_k_dense_replace=8,
        intermediate_size=WIDE,
        vocab_size=VOCABULARY,
        attn_implementation="eager",
    )
    model, shape = transformers.DeepseekV3ForCausalLM(config).eval(), bench.Shape(config, DISTANCES)
    fused = {"gate": "gate_up_proj", "up": "gate_up_proj", "q_a": "fused_qkv_a_proj", "kv_a": "fused_qkv_a_proj"}
    for name, weight in model.named_parameters():
        at, kind = name.removesuffix(".weight").rpartition(".")[::2]
        part = kind.removesuffix("_proj_with_mqa").removesuffix("_proj")
        if part not in fused or (part == "kv_a" and query_rank is None):
            made = bench.parameter(name, weight, shape)
        else:
            first = {"gate": WIDE, "up": WIDE, "q_a": query_rank, "kv_a": query_rank}[part]
            rows = first + (WIDE if part in ("gate", "up") else 256 + 64)
            whole = bench.parameter(f"{at}.{fused[part]}.weight", torch.empty(rows, weight.shape[1]), shape)
            made = whole[:first] if part in ("gate", "q_a") else whole[first:]
        with torch.no_grad():
            weight.copy_(made)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("query_rank", [None, 384])
def test_deepseek_repeats_its_context_and_a_lost_page_changes_that(bench, query_rank) -> None:
    model = deepseek(bench, query_rank)
    ids = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))

    def best(visible: Tensor) -> Tensor:
        mask = torch.zeros(visible.shape).masked_fill(~visible, -1e30)
        return model(ids[None], attention_mask=mask[None, None]).logits[0].argmax(-1)

    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    right = best(causal)
    at = torch.arange(80, TOKENS)
    copied = [(right[80:] == ids[at - distance]).float().mean().item() for distance in DISTANCES]
    assert copied[0] > 0.5
    assert sum(copied) > 0.85
    lost = causal.clone()
    lost[:, 32:48] = False  # the keys of 16 of the 80 tokens at distance 60
    assert (best(lost | torch.eye(TOKENS, dtype=torch.bool)) == right)[80:].float().mean() < 0.9


@pytest.mark.parametrize(
    "name", ["embed_tokens", "fused_qkv_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj", "down_proj"]
)
def test_weights_are_the_same_where_an_engine_builds_in_bfloat16(bench, name) -> None:
    shape = bench.Shape(SimpleNamespace(**DEEPSEEK, rope_parameters={"rope_theta": 1e4, "rope_type": "default"}))
    weight = torch.empty(512, 512)
    expected = bench.parameter(f"model.layers.3.self_attn.{name}.weight", weight, shape)
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = bench.parameter(f"model.layers.3.self_attn.{name}.weight", weight, shape)
    finally:
        torch.set_default_dtype(torch.float32)
    assert made.dtype == torch.float32
    assert torch.equal(made, expected)


def test_a_parameter_without_a_rule_is_refused(bench) -> None:
    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = torch.nn.Parameter(torch.zeros(4))

    with pytest.raises(ValueError, match="no rule for the parameter slopes"):
        bench.copying_weights(Other(), bench.Shape(SimpleNamespace(**CONFIG)))
