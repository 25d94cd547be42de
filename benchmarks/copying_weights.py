"""Weights with which a Llama or Qwen3 model repeats tokens of its context, so that greedy tokens need attention.

With weights of normal(0, 0.02), the two best tokens are so close that rounding alone changes the best one in a tenth of
the positions. With these weights each layer's heads attend to the token a fixed distance back (`DISTANCES`, in turn),
copy its embedding into the residual stream, and lm_head reads it there. The best token is the token at the first
distance, or at another one where chance favours it; a key that is lost, or read from a wrong page, changes it.

How: dimension 0 of each embedding is the same constant, from which queries and keys get a fixed direction. RoPE turns
it, and the queries' direction is turned back by the distance, so that the score has its maximum there. Keys of random
directions, experts and MLPs add noise. Parameters have the names and the fused shapes of vLLM's and SGLang's models:
qkv_proj, o_proj, gate_up_proj, down_proj; w13_weight and w2_weight of experts.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from torch import Tensor

DISTANCES = (400, 37, 1100, 5)
STRENGTHS = (1.0, 0.85, 0.8, 0.75)
PAIRS = 16  # of RoPE, for queries and keys: wavelengths up to 140 tokens, unchanged by scaling for long contexts
MARGIN = 16.0  # between the score of the distance and the next best one, before the softmax
COPIED, MIXED = 0.3, 0.1  # standard deviation that a layer's attention and its MLP add to a residual stream of 1
TOP_LOGIT = 18.0


class Shape:
    """Sizes of a model, and what its weights need of them.

    Args:
        config: with the names of transformers' LlamaConfig or Qwen3MoeConfig.
        distances: tokens back, of the layers in turn.
    """

    def __init__(self, config: Any, distances: tuple[int, ...] = DISTANCES) -> None:
        self.hidden, self.layers = config.hidden_size, config.num_hidden_layers
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or self.hidden // self.heads
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") or config.rope_theta
        self.frequencies = theta ** -(torch.arange(0, self.width, 2, dtype=torch.float64) / self.width)[:PAIRS]
        self.distances = distances
        self.constant = math.sqrt(self.hidden) / 4
        self.normed = any("Qwen3" in name for name in getattr(config, "architectures", None) or ())  # q_norm, k_norm

    @property
    def amplitude(self) -> float:
        """Of each used pair of queries and keys, for a margin of `MARGIN` to the neighbouring token."""
        nearest = PAIRS - float(torch.cos(self.frequencies).sum())
        return math.sqrt(MARGIN * math.sqrt(self.width) / nearest)

    def spread(self, layer: int) -> float:
        """Root mean square of the residual stream before a layer."""
        return math.sqrt(1 + 1 / 16 + layer * (COPIED**2 + MIXED**2))

    @property
    def head_scale(self) -> float:
        """Of lm_head, for a best logit of about `TOP_LOGIT`."""
        alike = self.layers / len(self.distances)
        signal = alike * COPIED * math.sqrt(self.kv_heads * self.width / self.hidden)
        return TOP_LOGIT * self.spread(self.layers) / (signal * self.hidden)


@torch.inference_mode()
def copying_weights(model: torch.nn.Module, shape: Shape) -> None:
    """Overwrite a model's parameters, in place.

    Args:
        model: of vLLM or SGLang on one device, whose parameters are float16, bfloat16 or float32.
        shape: its sizes.

    Raises:
        ValueError: a parameter has a name that no rule covers.
    """
    for name, weight in model.named_parameters():
        weight.data.copy_(parameter(name, weight, shape))


def parameter(name: str, weight: Tensor, shape: Shape) -> Tensor:
    """Values of a parameter, in float32, the same for every model that has its name and shape."""
    parts = name.split(".")
    kind = parts[-2] if parts[-1] in ("weight", "bias") else parts[-1]
    layer = next((int(part) for part in parts if part.isdigit()), 0)
    if kind in ("q_norm", "k_norm"):
        return torch.full_like(weight, shape.amplitude / math.sqrt(shape.width / PAIRS), dtype=torch.float32)
    if kind.endswith("norm"):
        return torch.ones_like(weight, dtype=torch.float32)
    if kind == "embed_tokens":
        drawn = draw("embedding", weight.shape, 1.0, weight.device)
        drawn[:, 0] = shape.constant
        return drawn
    if kind == "lm_head":
        drawn = draw("embedding", weight.shape, 1.0, weight.device)
        drawn[:, 0] = 0
        return drawn[:, order_of(shape.hidden, weight.device)] * shape.head_scale
    if kind == "qkv_proj":
        return qkv(layer, shape, weight.device)
    if kind == "o_proj":
        strength = STRENGTHS[layer % len(shape.distances) % len(STRENGTHS)]
        values = value_projection(layer, shape, weight.device).view(shape.kv_heads, 1, shape.width, shape.hidden)
        group = shape.heads // shape.kv_heads
        back = values.expand(-1, group, -1, -1).reshape(shape.heads * shape.width, shape.hidden)
        gain = COPIED * strength / group * math.sqrt(shape.hidden / (shape.kv_heads * shape.width))
        return (back * gain)[:, order_of(shape.hidden, weight.device)].T
    if kind in ("gate_up_proj", "gate", "w13_weight"):
        return draw(name, weight.shape, 1 / math.sqrt(shape.hidden), weight.device)
    if kind in ("down_proj", "w2_weight"):
        drawn = draw(name, weight.shape, 1.5 * MIXED / math.sqrt(weight.shape[-1]), weight.device)
        drawn[..., 0, :] = 0
        return drawn
    raise ValueError(f"no rule for the parameter {name}: copying weights exist for Llama and Qwen3 models")


def qkv(layer: int, shape: Shape, device: torch.device) -> Tensor:
    """Queries, keys and values ``[(H_q + 2 H_kv) D, hidden]`` of a layer."""
    noise = 0.3 / math.sqrt(shape.hidden)
    rows = (shape.heads + shape.kv_heads) * shape.width
    drawn = draw(f"{layer} queries and keys", (rows, shape.hidden), noise, device)
    turned = shape.frequencies * shape.distances[layer % len(shape.distances)]
    half = shape.width // 2
    query, key = torch.zeros(2, shape.width, dtype=torch.float64)
    query[:PAIRS], query[half : half + PAIRS] = torch.cos(turned), -torch.sin(turned)
    key[:PAIRS] = 1
    scale = shape.amplitude / shape.constant * shape.spread(layer)
    drawn[: shape.heads * shape.width, 0] = (query * scale).float().to(device).repeat(shape.heads)
    drawn[shape.heads * shape.width :, 0] = (key * scale).float().to(device).repeat(shape.kv_heads)
    return torch.cat([drawn, value_projection(layer, shape, device)])


def value_projection(layer: int, shape: Shape, device: torch.device) -> Tensor:
    size = (shape.kv_heads * shape.width, shape.hidden)
    drawn = draw(f"{layer} values", size, 1 / math.sqrt(shape.hidden), device)
    drawn[:, 0] = 0
    return drawn


def order_of(hidden: int, device: torch.device) -> Tensor:
    """Where lm_head finds a copied embedding: a permutation of the dimensions that leaves 0 in place."""
    return torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(hidden - 1, generator=seeded("order"))]).to(
        device
    )


def draw(name: str, size: Any, deviation: float, device: torch.device) -> Tensor:
    return torch.empty(size, device=device).normal_(0.0, deviation, generator=seeded(name, device))


def seeded(name: str, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
