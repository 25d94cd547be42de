"""The models of examples/serve.py: Llama, Qwen3 and Qwen3-MoE, with weights of a checkpoint or random ones."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernelhub


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a Llama, a Qwen3 or a Qwen3-MoE."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of an expert, if there are experts
    vocab: int
    theta: float = 500_000.0
    eps: float = 1e-5
    experts: int = 0
    top_k: int = 0
    renormalize: bool = True
    qk_norm: bool = False
    tied: bool = False
    max_len: int = 8192
    eos: tuple[int, ...] = ()
    rope_scaling: tuple[float, float, float, int] | None = None  # factor, low, high, original length of Llama 3.1

    @classmethod
    def read(cls, folder: Path) -> Config:
        """Read the config.json of a checkpoint.

        Raises:
            SystemExit: it is no such file, or has a feature that this example does not compute.
        """
        try:
            said = json.loads((folder / "config.json").read_text())
        except ValueError as error:
            raise SystemExit(f"{folder}/config.json is not JSON: {error}") from None
        if not isinstance(said, dict):
            raise SystemExit(f"{folder}/config.json holds no object of names and values")
        try:
            return cls._of(folder, said)
        except KeyError as error:
            raise SystemExit(f"{folder}/config.json has no {error.args[0]}") from None
        except (TypeError, ValueError) as error:
            raise SystemExit(f"{folder}/config.json has a value of another type than it should: {error}") from None

    @classmethod
    def _of(cls, folder: Path, said: dict[str, Any]) -> Config:
        kind, eos = said.get("model_type"), said.get("eos_token_id")
        if kind not in ("llama", "qwen3", "qwen3_moe"):
            raise SystemExit(f"{folder} is of model_type {kind!r}; this example serves llama, qwen3 and qwen3_moe")
        if feature := _unsupported(said):
            raise SystemExit(
                f"{folder}: {feature} is not supported by this example: serve the model with vLLM or SGLang"
            )
        rope = {"rope_theta": said.get("rope_theta", 10_000.0)} | (said.get("rope_scaling") or {})
        rope |= said.get("rope_parameters") or {}  # as transformers 5 writes both
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        heads = said["num_attention_heads"]
        return cls(
            said["hidden_size"],
            said["num_hidden_layers"],
            heads,
            said.get("num_key_value_heads", heads),
            said.get("head_dim") or said["hidden_size"] // heads,
            said["moe_intermediate_size"] if kind == "qwen3_moe" else said["intermediate_size"],
            said["vocab_size"],
            float(rope["rope_theta"]),
            said["rms_norm_eps"],
            said.get("num_experts") or said.get("num_local_experts", 0),
            said.get("num_experts_per_tok", 0),
            said.get("norm_topk_prob", True),
            kind != "llama",
            said.get("tie_word_embeddings", False),
            said["max_position_embeddings"],
            tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            tuple(rope[name] for name in names) if "low_freq_factor" in rope else None,
        )


def _unsupported(said: dict[str, Any]) -> str | None:
    """The first feature of a config.json that the model here would compute wrongly."""
    rope = (said.get("rope_scaling") or {}) | (said.get("rope_parameters") or {})
    form = rope.get("rope_type", rope.get("type", "default"))
    wrong = {
        f"rope scaling of type {form!r}": form not in ("default", "llama3"),
        "quantization_config": bool(said.get("quantization_config")),
        "attention_bias": bool(said.get("attention_bias")),
        "mlp_bias": bool(said.get("mlp_bias")),
        f"hidden_act {said.get('hidden_act')!r}": said.get("hidden_act", "silu") not in ("silu", "swish"),
        "sliding windows": bool(said.get("use_sliding_window")),
        "dense layers among experts": bool(said.get("mlp_only_layers")) or said.get("decoder_sparse_step", 1) != 1,
    }
    return next((feature for feature, given in wrong.items() if given), None)


SHAPES = {
    "llama-tiny": Config(512, 4, 8, 2, 64, 1024, 512, max_len=2048),
    "qwen3-moe-tiny": Config(512, 4, 8, 2, 64, 256, 512, experts=16, top_k=4, qk_norm=True, max_len=2048),
    "llama-3.1-8b": Config(4096, 32, 32, 8, 128, 14336, 128256, rope_scaling=(8.0, 1.0, 4.0, 8192), max_len=131072),
    "qwen3-30b-a3b": Config(
        2048, 48, 32, 4, 128, 768, 151936, 1e6, 1e-6, experts=128, top_k=8, qk_norm=True, max_len=40960
    ),
}


def weight_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names, as of Hugging Face's checkpoints, and shapes of all weights."""
    hidden, wide, inner = config.hidden, config.head_dim, config.intermediate
    yield "model.embed_tokens.weight", (config.vocab, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tied:
        yield "lm_head.weight", (config.vocab, hidden)
    for layer in (f"model.layers.{index}." for index in range(config.layers)):
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        yield layer + "self_attn.q_proj.weight", (config.heads * wide, hidden)
        yield layer + "self_attn.k_proj.weight", (config.kv_heads * wide, hidden)
        yield layer + "self_attn.v_proj.weight", (config.kv_heads * wide, hidden)
        yield layer + "self_attn.o_proj.weight", (hidden, config.heads * wide)
        for norm in ("q_norm", "k_norm") if config.qk_norm else ():
            yield f"{layer}self_attn.{norm}.weight", (wide,)
        if config.experts:
            yield layer + "mlp.gate.weight", (config.experts, hidden)
        for mlp in [f"mlp.experts.{expert}." for expert in range(config.experts)] or ["mlp."]:
            yield f"{layer}{mlp}gate_proj.weight", (inner, hidden)
            yield f"{layer}{mlp}up_proj.weight", (inner, hidden)
            yield f"{layer}{mlp}down_proj.weight", (hidden, inner)


def random_weights(config: Config, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Seeded weights: norms 1, the rest normal with a deviation of 0.02, as models are initialised."""
    random = torch.Generator(device).manual_seed(0)
    made = {}
    for name, shape in weight_shapes(config):
        empty = torch.empty(shape, device=device, dtype=dtype)
        made[name] = empty.fill_(1.0) if "norm" in name else empty.normal_(0.0, 0.02, generator=random)
    return made


def load_weights(folder: Path, config: Config, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a checkpoint's *.safetensors; an error names what is missing or of another shape."""
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt", device=str(device)) as file:
                found |= {name: file.get_tensor(name).to(dtype) for name in file.keys()}  # noqa: SIM118
        except Exception as error:  # the package raises plain ones
            raise SystemExit(f"{path} cannot be read: {error}") from None
    for name, shape in weight_shapes(config):
        if name not in found or tuple(found[name].shape) != shape:
            got = list(found[name].shape) if name in found else "missing"
            raise SystemExit(f"{folder}: weight {name} is {got}; config.json asks for {list(shape)}")
    return found


class Model:
    """A decoder. Products of dense weights and the rotation run in torch, all else through kernelhub."""

    def __init__(self, config: Config, weights: dict[str, Tensor]) -> None:
        self.config = config
        self.embed, self.norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self.head = weights.get("lm_head.weight", self.embed)
        self.layers = [self._layer(f"model.layers.{index}.", weights) for index in range(config.layers)]
        self.rotation = self._rotation(self.embed.device)

    def _layer(self, prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a layer, joined where they multiply the same input; the parts are dropped."""
        take = {name.removeprefix(prefix): weights.pop(name) for name in list(weights) if name.startswith(prefix)}
        get = {name.removesuffix(".weight"): weight for name, weight in take.items()}
        made = {"qkv": torch.cat([get[f"self_attn.{name}_proj"] for name in "qkv"]), "o": get["self_attn.o_proj"]}
        made |= {"norm1": get["input_layernorm"], "norm2": get["post_attention_layernorm"]}
        if self.config.qk_norm:
            made |= {"q_norm": get["self_attn.q_norm"], "k_norm": get["self_attn.k_norm"]}
        gates = [f"mlp.experts.{expert}." for expert in range(self.config.experts)] or ["mlp."]
        w13 = [torch.cat([get[f"{mlp}gate_proj"], get[f"{mlp}up_proj"]]) for mlp in gates]
        w2 = [get[f"{mlp}down_proj"] for mlp in gates]
        if self.config.experts:
            return made | {"router": get["mlp.gate"], "w13": torch.stack(w13), "w2": torch.stack(w2)}
        return made | {"w13": w13[0], "w2": w2[0]}

    def _rotation(self, device: torch.device) -> Tensor:
        """Factors of x, and of x rolled by half a head, at every position: ``[max_len, 2 * head_dim]``."""
        half = torch.arange(0, self.config.head_dim, 2, device=device, dtype=torch.float32) / self.config.head_dim
        frequency = self.config.theta**-half
        if self.config.rope_scaling is not None:
            factor, low, high, length = self.config.rope_scaling
            turns = length * frequency / (2 * math.pi)
            keep = ((turns - low) / (high - low)).clamp(0, 1)
            frequency = keep * frequency + (1 - keep) * frequency / factor
        angle = torch.arange(self.config.max_len, device=device, dtype=torch.float32)[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([cos, cos, -sin, sin], -1).to(self.embed.dtype)  # as transformers rounds them

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.addcmul(x * cos, x.roll(self.config.head_dim // 2, -1), sin)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        caches: list[tuple[Tensor, Tensor]],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        last: Tensor | None = None,
    ) -> Tensor:
        """Logits of the rows `last`, or of all. Tokens, positions and slots are ``[T]``; slot -1 is not written."""
        config, width = self.config, self.config.head_dim
        x, residual = F.embedding(tokens, self.embed), None
        cos, sin = self.rotation[positions][:, None].chunk(2, -1)
        heads = [config.heads + config.kv_heads, config.kv_heads]
        for layer, (k_cache, v_cache) in zip(self.layers, caches, strict=True):
            normed, residual = self._normed(x, layer["norm1"], residual)
            qk, v = F.linear(normed, layer["qkv"]).unflatten(-1, (-1, width)).split(heads, 1)
            if config.qk_norm:
                q, k = qk.split([config.heads, config.kv_heads], 1)
                q = F.rms_norm(q, (width,), layer["q_norm"], config.eps)
                qk = torch.cat([q, F.rms_norm(k, (width,), layer["k_norm"], config.eps)], 1)
            q, k = self._rotate(qk, cos, sin).split([config.heads, config.kv_heads], 1)
            kernelhub.write_kv_cache(k, v, k_cache, v_cache, slots)
            x = F.linear(attend(q, k_cache, v_cache).flatten(1), layer["o"])
            normed, residual = self._normed(x, layer["norm2"], residual)
            if config.experts:
                logits = F.linear(normed, layer["router"])
                routed = kernelhub.route_experts(logits, config.top_k, renormalize=config.renormalize)
                x = kernelhub.fused_moe(normed, layer["w13"], layer["w2"], *routed)
            else:
                x = F.linear(kernelhub.silu_and_mul_quant(F.linear(normed, layer["w13"])), layer["w2"])
        if last is not None:
            x, residual = x[last], None if residual is None else residual[last]
        return F.linear(self._normed(x, self.norm, residual)[0], self.head)

    def _normed(self, x: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """RMSNorm of x, added to the residual, and that sum."""
        if residual is None:
            return kernelhub.rms_norm_quant(x, weight, self.config.eps), x
        normed, total = kernelhub.rms_norm_quant(x, weight, self.config.eps, residual)
        return normed, total
