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


def test_a_parameter_without_a_rule_is_refused(bench) -> None:
    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks = torch.nn.Parameter(torch.zeros(4))

    with pytest.raises(ValueError, match="no rule for the parameter sinks"):
        bench.copying_weights(Other(), bench.Shape(SimpleNamespace(**CONFIG)))
