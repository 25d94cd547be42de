"""Qwen3 of these layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * theta ** (-torch.arange(half) / half)
    first, second = x.split(half, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, wide = config, config.head_dim
        heads, kv_heads = config.num_attention_heads * wide, config.num_key_value_heads * wide
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, heads, kv_heads, kv_heads)
        self.o_proj = RowParallelLinear(heads, config.hidden_size)
        self.gate_up_proj = ColumnParallelLinear(config.hidden_size, *[config.intermediate_size] * 2)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size)
        self.q_norm, self.k_norm = (nn.RMSNorm(wide, config.rms_norm_eps) for _ in range(2))
        sizes = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(*sizes), nn.RMSNorm(*sizes)
        self.attn = Attention(wide**-0.5)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(self.input_layernorm(x)).split(self.qkv_proj.parts, -1)
        q, k, v = (part.unflatten(-1, (-1, self.config.head_dim)) for part in (q, k, v))
        q, k = (rotated(norm(part), positions, 1e6) for norm, part in ((self.q_norm, q), (self.k_norm, k)))
        x = x + self.o_proj(self.attn(q, k, v).flatten(-2).flatten(1))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, -1)
        return x + self.down_proj(nn.functional.silu(gate) * up)


class Qwen3ForCausalLM(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(positions, x)
        return self.norm(x)

    def compute_logits(self, x: Tensor) -> Tensor | None:
        return self.lm_head(x)
