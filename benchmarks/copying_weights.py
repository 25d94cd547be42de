"""Weights with which a Llama, Qwen3, gpt-oss, Gemma 2 or DeepSeek model repeats its context, by attention.

With weights of normal(0, 0.02), the two best tokens are so close that rounding alone changes the best one in a tenth of
the positions. With these weights each layer's heads attend to the token a fixed distance back (`DISTANCES`, in turn),
copy its embedding into the residual stream, and lm_head reads it there. The best token is the token at the first
distance, or at another one where chance favours it; a key that is lost, or read from a wrong page, changes it.

How: dimension 0 of each embedding is the same constant, from which queries and keys get a fixed direction. RoPE turns
it, and the queries' direction is turned back by the distance, so that the score has its maximum there. Keys of random
directions, experts and MLPs add noise. Parameters have the names and the fused shapes of vLLM's and SGLang's models:
qkv_proj, o_proj, gate_up_proj, down_proj; w13_weight and w2_weight of experts. Layers of gpt-oss with a window attend
to the distances within it (`WINDOWED`); its sinks take a part of each head's weights, so that a sink that is lost shows
in the log-probabilities; its biases are 0, and all tokens have the same experts. Gemma 2 has no lm_head: what a layer
copies stays in place, and the norms after attention make it larger than the token's own embedding; its scores are
lower, so that the softcap leaves a margin. DeepSeek's direction is in the part of queries and keys that RoPE turns, and
its values are the latents (fused_qkv_a_proj or q_proj and kv_a_proj_with_mqa; q_b_proj, kv_b_proj).
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from torch import Tensor

DISTANCES = (400, 37, 1100, 5)
STRENGTHS = (1.0, 0.85, 0.8, 0.75)
WINDOWED = (37, 400, 5, 1100)  # of gpt-oss, whose even layers see 128 tokens
PAIRS = 16  # of RoPE, for queries and keys: wavelengths up to 140 tokens, unchanged by scaling for long contexts
OF_GEMMA = (400, 1100, 37, 5)  # of Gemma 2, whose even layers have a window
ADDED = (2.0, 1.0, 1.0, 1.0, 0.7)  # by Gemma 2's layers, the last value by all later ones, to an embedding of 1
UNEQUAL = (0.7, 1.0, 0.45, 0.35)  # of gpt-oss, whose values are of low rank: nearer ones would leave no margin
SUNK = 2.0  # by how much a sink is below the score of the distance
MARGIN = 16.0  # between the score of the distance and the next best one, before the softmax
CAPPED_MARGIN = 9.0  # of Gemma 2, before its softcap of 50, which leaves 5
COPIED, MIXED = 0.3, 0.1  # standard deviation that a layer's attention and its MLP add to a residual stream of 1
TOP_LOGIT = 18.0


class Shape:
    """Sizes of a model, and what its weights need of them.

    Args:
        config: with the names of transformers' LlamaConfig, Qwen3MoeConfig, GptOssConfig, Gemma2Config or
            DeepseekV3Config.
        distances: tokens back, of the layers in turn; `DISTANCES`, `WINDOWED` or `OF_GEMMA`.
    """

    def __init__(self, config: Any, distances: tuple[int, ...] = ()) -> None:
        self.hidden, self.layers = config.hidden_size, config.num_hidden_layers
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.latent = Latent(config, self.heads) if getattr(config, "kv_lora_rank", None) else None
        if self.latent is None:
            self.width = self.turning = getattr(config, "head_dim", None) or self.hidden // self.heads
            self.rank = self.kv_heads * self.width
        else:
            self.width, self.turning = self.latent.plain + self.latent.turning, self.latent.turning
            self.rank = min(self.latent.rank, self.heads * self.latent.values)
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") or config.rope_theta
        frequencies = theta ** -(torch.arange(0, self.turning, 2, dtype=torch.float64) / self.turning)[:PAIRS]
        self.turn = 1.0  # factor of queries and keys, by YaRN, which leaves short wavelengths as they are
        if rope.get("rope_type") == "yarn":
            longest = rope["original_max_position_embeddings"] / rope.get("beta_fast", 32.0)
            frequencies = frequencies[2 * math.pi / frequencies <= longest]
            self.turn = 1 + 0.1 * math.log(rope["factor"])
        self.frequencies, self.pairs = frequencies, len(frequencies)
        sunk = any("GptOss" in name for name in getattr(config, "architectures", None) or ())
        self.gemma = any("Gemma2" in name for name in getattr(config, "architectures", None) or ())
        self.margin = CAPPED_MARGIN if self.gemma else MARGIN
        self.distances = distances or (WINDOWED if sunk else OF_GEMMA if self.gemma else DISTANCES)
        self.strengths = UNEQUAL if sunk else STRENGTHS
        self.noise = 0.1 if sunk else 0.3  # of queries and keys; more would let sinks take all of some heads
        self.constant = math.sqrt(self.hidden) / 4
        self.normed = any("Qwen3" in name for name in getattr(config, "architectures", None) or ())  # q_norm, k_norm

    @property
    def amplitude(self) -> float:
        """Of each used pair of queries and keys, for the margin to the neighbouring token."""
        nearest = self.pairs - float(torch.cos(self.frequencies).sum())
        return math.sqrt(self.margin * math.sqrt(self.width) / nearest)

    @property
    def best_score(self) -> float:
        """Of the key at the distance."""
        return self.pairs * (self.amplitude * self.turn) ** 2 / math.sqrt(self.width)

    def spread(self, layer: int) -> float:
        """Root mean square of the residual stream before a layer."""
        copied = sum(self.added(before) ** 2 for before in range(layer)) if self.gemma else layer * COPIED**2
        return math.sqrt(1 + 1 / 16 + copied + layer * MIXED**2)

    def added(self, layer: int) -> float:
        """Root mean square of what the attention of Gemma 2's layer adds to the residual stream."""
        return ADDED[min(layer, len(ADDED) - 1)]

    @property
    def head_scale(self) -> float:
        """Of lm_head, for a best logit of about `TOP_LOGIT`."""
        alike = self.layers / len(self.distances)
        signal = alike * COPIED * math.sqrt(self.rank / self.hidden)
        return TOP_LOGIT * self.spread(self.layers) / (signal * self.hidden)

    def directions(self, layer: int) -> tuple[Tensor, Tensor]:
        """Of a query and of a key, in each pair that is used: ``[2, pairs]``."""
        turned = self.frequencies * self.distances[layer % len(self.distances)]
        key = torch.zeros(2, self.pairs, dtype=torch.float64)
        key[0] = 1
        return torch.stack([torch.cos(turned), -torch.sin(turned)]), key

    def gain(self, layer: int) -> float:
        """Of o_proj, whose input copies a projection of the embedding on `rank` dimensions."""
        strength = self.strengths[layer % len(self.distances) % len(self.strengths)]
        return COPIED * strength * math.sqrt(self.hidden / self.rank)


class Latent:
    """Sizes of DeepSeek's attention over latents: `turning` dimensions of a head have RoPE, `plain` ones have not."""

    def __init__(self, config: Any, heads: int) -> None:
        self.rank, self.query_rank = config.kv_lora_rank, getattr(config, "q_lora_rank", None)
        self.plain, self.turning, self.values = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.heads = heads


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
    if kind == "router":  # the same experts for all tokens, so that no rounding chooses others
        order = torch.arange(weight.shape[0], 0, -1, dtype=torch.float32, device=weight.device)
        return order if weight.ndim == 1 else torch.zeros_like(weight, dtype=torch.float32)
    if kind.endswith("bias") or parts[-1] == "bias":
        return torch.zeros_like(weight, dtype=torch.float32)
    if kind == "sinks":
        return torch.full_like(weight, shape.best_score - SUNK, dtype=torch.float32)
    if kind in ("q_norm", "k_norm"):
        return torch.full_like(weight, shape.amplitude / math.sqrt(shape.width / shape.pairs), dtype=torch.float32)
    if kind.endswith("norm") and shape.gemma:  # which multiplies by 1 and the weight
        factors = {"post_attention_layernorm": shape.added(layer), "post_feedforward_layernorm": MIXED}
        return torch.full_like(weight, factors.get(kind, 1.0) - 1, dtype=torch.float32)
    if kind.endswith("norm"):
        return torch.ones_like(weight, dtype=torch.float32)
    if kind in ("embed_tokens", "embedding"):
        drawn = draw("embedding", weight.shape, 1.0, weight.device)
        drawn[:, 0] = shape.constant
        return drawn / math.sqrt(shape.hidden) if shape.gemma else drawn  # which Gemma 2 multiplies by
    if kind == "lm_head":
        drawn = draw("embedding", weight.shape, 1.0, weight.device)
        drawn[:, 0] = 0
        return drawn[:, order_of(shape.hidden, weight.device)] * shape.head_scale
    if kind == "qkv_proj":
        return qkv(layer, shape, weight.device)
    if kind in LATENT and shape.latent is not None:
        return LATENT[kind](layer, shape, shape.latent, weight.device)
    if kind == "o_proj":
        if shape.latent is not None:
            back = latent_values(layer, shape.latent, weight.device) @ value_projection(layer, shape, weight.device)
        else:
            values = value_projection(layer, shape, weight.device).view(shape.kv_heads, 1, shape.width, shape.hidden)
            group = shape.heads // shape.kv_heads
            back = values.expand(-1, group, -1, -1).reshape(shape.heads * shape.width, shape.hidden) / group
        if shape.gemma:
            return back.T
        return (back * shape.gain(layer))[:, order_of(shape.hidden, weight.device)].T
    if kind in ("gate_up_proj", "gate", "w13_weight"):
        return draw(name, weight.shape, 1 / math.sqrt(shape.hidden), weight.device)
    if kind in ("down_proj", "w2_weight"):
        drawn = draw(name, weight.shape, 1.5 * MIXED / math.sqrt(weight.shape[-1]), weight.device)
        drawn[..., 0, :] = 0
        return drawn
    raise ValueError(
        f"no rule for the parameter {name}: copying weights exist for Llama, Qwen3, gpt-oss, Gemma 2, DeepSeek V3"
    )


def qkv(layer: int, shape: Shape, device: torch.device) -> Tensor:
    """Queries, keys and values ``[(H_q + 2 H_kv) D, hidden]`` of a layer."""
    noise = shape.noise / math.sqrt(shape.hidden)
    rows = (shape.heads + shape.kv_heads) * shape.width
    drawn = draw(f"{layer} queries and keys", (rows, shape.hidden), noise, device)
    query, key = torch.zeros(2, 2, shape.width // 2, dtype=torch.float64)
    query[:, : shape.pairs], key[:, : shape.pairs] = shape.directions(layer)
    query, key = query.flatten(), key.flatten()
    scale = shape.amplitude / shape.constant * shape.spread(layer)
    drawn[: shape.heads * shape.width, 0] = (query * scale).float().to(device).repeat(shape.heads)
    drawn[shape.heads * shape.width :, 0] = (key * scale).float().to(device).repeat(shape.kv_heads)
    return torch.cat([drawn, value_projection(layer, shape, device)])


def value_projection(layer: int, shape: Shape, device: torch.device) -> Tensor:
    """Values of all heads, or DeepSeek's latents, of the residual stream."""
    size = (shape.latent.rank if shape.latent else shape.kv_heads * shape.width, shape.hidden)
    drawn = draw(f"{layer} values", size, 1 / math.sqrt(shape.hidden), device)
    drawn[:, 0] = 0
    return drawn


def turning_part(direction: Tensor, latent: Latent, device: torch.device) -> Tensor:
    """A direction as the part of a head with RoPE has it, whose pairs are neighbours."""
    part = torch.zeros(latent.turning // 2, 2, dtype=torch.float64)
    part[: direction.shape[1]] = direction.T
    return part.flatten().float().to(device)


def latent_keys(layer: int, shape: Shape, latent: Latent, device: torch.device) -> Tensor:
    """kv_a_proj_with_mqa ``[rank + turning, hidden]``: the latents, then the part of all heads' keys with RoPE."""
    noise = shape.noise / math.sqrt(shape.hidden)
    turning = draw(f"{layer} turning keys", (latent.turning, shape.hidden), noise, device)
    scale = shape.amplitude / shape.constant * shape.spread(layer)
    turning[:, 0] = turning_part(shape.directions(layer)[1] * scale, latent, device)
    return torch.cat([value_projection(layer, shape, device), turning])


def latent_queries_and_keys(layer: int, shape: Shape, latent: Latent, device: torch.device) -> Tensor:
    """fused_qkv_a_proj: the queries' latents ``[query_rank, hidden]``, the first constant, then `latent_keys`."""
    assert latent.query_rank is not None
    queries = draw(f"{layer} query latents", (latent.query_rank, shape.hidden), 1 / math.sqrt(shape.hidden), device)
    queries[:, 0] = 0
    queries[0] = 0
    queries[0, 0] = math.sqrt(latent.query_rank) / 4 / shape.constant * shape.spread(layer)
    return torch.cat([queries, latent_keys(layer, shape, latent, device)])


def latent_queries(layer: int, shape: Shape, latent: Latent, device: torch.device) -> Tensor:
    """q_proj or q_b_proj ``[H (plain + turning), hidden or query_rank]``, whose input has a constant in dimension 0."""
    read = latent.query_rank or shape.hidden
    constant = shape.constant / shape.spread(layer)
    if latent.query_rank:  # after q_a_layernorm
        constant = math.sqrt(read) / 4 / math.sqrt(1 / 16 + 1 - 1 / (16 * shape.spread(layer) ** 2))
    rows = latent.heads, latent.plain + latent.turning, read
    drawn = draw(f"{layer} queries", rows, shape.noise / math.sqrt(read), device)
    drawn[:, latent.plain :, 0] = turning_part(shape.directions(layer)[0] * shape.amplitude / constant, latent, device)
    return drawn.flatten(0, 1)


def latent_keys_and_values(layer: int, shape: Shape, latent: Latent, device: torch.device) -> Tensor:
    """kv_b_proj ``[H (plain + values), rank]``."""
    keys = (latent.heads, latent.plain, latent.rank)
    keys = draw(f"{layer} plain keys", keys, shape.noise / math.sqrt(latent.rank), device)
    values = latent_values(layer, latent, device).view(latent.heads, latent.values, latent.rank)
    return torch.cat([keys, values], dim=1).flatten(0, 1)


def latent_values(layer: int, latent: Latent, device: torch.device) -> Tensor:
    """Values of all heads from a latent ``[H values, rank]``, from which o_proj gets the latent back: Q' Q is 1."""
    size = latent.heads * latent.values, latent.rank
    drawn = draw(f"{layer} latent values", (max(size), min(size)), 1.0, device)
    whole = torch.linalg.qr(drawn).Q
    return whole if size[0] >= size[1] else whole.T


LATENT = {
    "fused_qkv_a_proj": latent_queries_and_keys,
    "kv_a_proj_with_mqa": latent_keys,
    "q_proj": latent_queries,
    "q_b_proj": latent_queries,
    "kv_b_proj": latent_keys_and_values,
}


def order_of(hidden: int, device: torch.device) -> Tensor:
    """Where lm_head finds a copied embedding: a permutation of the dimensions that leaves 0 in place."""
    return torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(hidden - 1, generator=seeded("order"))]).to(
        device
    )


def draw(name: str, size: Any, deviation: float, device: torch.device) -> Tensor:
    # Engines build models with another default dtype.
    return torch.empty(size, device=device, dtype=torch.float32).normal_(0.0, deviation, generator=seeded(name, device))


def seeded(name: str, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
