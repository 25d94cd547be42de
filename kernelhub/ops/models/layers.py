"""The problems of each part of a decoder on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kernelhub.errors import ConfigurationError
from kernelhub.ops.attention.problem import ANY, FP8, MANY, ONE
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
    LatentAttention,
)

PREFILL, DECODE = "prefill", "decode"
BOTH = (PREFILL, DECODE)
_FP8 = (FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK)
_SCALING = {FP8_TENSOR: "tensor", FP8_CHANNEL: "row", FP8_BLOCK: "block"}
_GROUPS = {NVFP4: 16, MXFP4: 32, MXINT4: 32}
_GRANULARITY = {FP8_TENSOR: "tensor", FP8_CHANNEL: "token", FP8_BLOCK: "group"}


@dataclass(frozen=True)
class Setting:
    """How a model is served: as of `problems_of`."""

    tp: int
    ep: int
    dtype: str
    kv_dtype: str
    page_size: int

    def share(self, what: str, size: int) -> int:
        """One rank's part of a size.

        Raises:
            ConfigurationError: it cannot be shared out evenly.
        """
        if size % self.tp:
            raise ConfigurationError(f"{what} is {size}, which {self.tp} ranks cannot share evenly; choose another tp")
        return size // self.tp


@dataclass(frozen=True)
class LayerCall:
    """One problem of a part of the model; `sizes` are sizes of its calls that no facet contains."""

    op: str
    phases: tuple[str, ...]
    layer: str
    facets: dict[str, Any]
    sizes: dict[str, int] = field(default_factory=dict)


def layer_calls(model: Description, setting: Setting) -> Iterator[LayerCall]:
    """All calls of a model on one rank."""
    if isinstance(model.attention, LatentAttention):
        yield from _latent_attention(model.attention, model, setting)
    else:
        yield from _attention(model.attention, setting)
    yield from _products(model, setting)
    if model.experts is not None:
        yield from _experts(model.experts, model, setting)


def _attention(attention: Attention, setting: Setting) -> Iterator[LayerCall]:
    """Prefill over packed sequences and over pages; decode over pages. KV heads that are too few are repeated."""
    heads = setting.share("num_attention_heads", attention.num_q_heads)
    if setting.tp > attention.num_kv_heads and setting.tp % attention.num_kv_heads == 0:
        kv_heads = 1
    else:
        kv_heads = setting.share("num_key_value_heads", attention.num_kv_heads)
    for windowed in attention.windowed:
        layer = "windowed attention" if windowed else "attention"
        common = {
            "q_dtype": setting.dtype,
            "head_dim_qk": attention.head_dim,
            "head_dim_vo": attention.head_dim,
            "num_q_heads": heads,
            "num_kv_heads": kv_heads,
            "window_left": windowed,
            "softcap": attention.softcap is not None,
            "sinks": attention.sinks,
        }
        packed = {**common, "kv_dtype": setting.dtype, "ragged": True, "causal": True}
        sizes = {"window": attention.window} if windowed else {}
        yield LayerCall("attention", (PREFILL,), layer, {**packed, "q_len": MANY}, sizes)
        paged = {**common, **_cache(setting), "page_size": setting.page_size}
        yield LayerCall("paged_attention", (DECODE,), layer, {**paged, "q_len": ONE, "causal": False}, sizes)
        for q_len in (MANY, ANY):
            ragged = {**paged, "q_len": q_len, "ragged": True, "causal": True}
            yield LayerCall("paged_attention", (PREFILL,), layer, ragged, sizes)


def _cache(setting: Setting) -> dict[str, Any]:
    return {"kv_dtype": setting.kv_dtype, "kv_scale": "value" if setting.kv_dtype == FP8 else None}


def _latent_attention(attention: LatentAttention, model: Description, setting: Setting) -> Iterator[LayerCall]:
    """Prefill with keys of each head, or sparsely over latents; decode over latents with absorbed projections."""
    heads = setting.share("num_attention_heads", attention.num_heads)
    dtype, rope, latent = setting.dtype, attention.qk_rope_head_dim, attention.kv_lora_rank
    layer, sparse = "latent attention", attention.indexer is not None
    yield LayerCall(
        "attention",
        (PREFILL,),
        layer,
        {
            "q_dtype": dtype,
            "kv_dtype": dtype,
            "head_dim_qk": attention.qk_nope_head_dim + rope,
            "head_dim_vo": attention.v_head_dim,
            "num_q_heads": heads,
            "num_kv_heads": heads,
            "q_len": MANY,
            "ragged": True,
            "causal": True,
        },
    )
    widths = {"num_heads": heads, "nope_dim": attention.qk_nope_head_dim, "rope_dim": rope}
    beside = {"v_head_dim": attention.v_head_dim}
    yield LayerCall("concat_mla_k", (PREFILL,), layer, {"dtype": dtype, **widths}, beside)
    written = {"dtype": dtype, "latent_dim": latent, "rope_dim": rope, "page_size": setting.page_size}
    yield LayerCall("write_mla_cache", BOTH, layer, {**written, **_cache(setting)})
    absorbed = {
        "q_dtype": dtype,
        "num_heads": heads,
        "head_dim": latent + rope,
        "value_dim": latent,
        "page_size": setting.page_size,
        "sparse": sparse,
        **_cache(setting),
    }
    sizes = {"nope_dim": attention.qk_nope_head_dim}
    if attention.indexer is not None:
        sizes["topk"] = attention.indexer.topk
    yield LayerCall("mla_attention", (DECODE,), layer, {**absorbed, "q_len": ONE, "causal": False}, sizes)
    ragged = {**absorbed, "q_len": MANY, "ragged": True, "causal": True}
    yield LayerCall("mla_attention", (PREFILL,), layer, ragged, sizes)
    if model.linear in _FP8:
        for n, k in ((latent, attention.qk_nope_head_dim), (attention.v_head_dim, latent)):
            shape = {"n": n, "k": k, "out_dtype": dtype}
            yield LayerCall("bmm_fp8", BOTH, "absorbed projections", shape, {"batch": heads})
    if attention.indexer is not None:
        heads_of = {"num_heads": attention.indexer.num_heads, "head_dim": attention.indexer.head_dim, "k_scale": True}
        yield LayerCall("mqa_logits", (PREFILL,), "indexer", heads_of)
        yield LayerCall("paged_mqa_logits", (DECODE,), "indexer", {**heads_of, "page_size": setting.page_size})
        top = {"k": attention.indexer.topk, "row_ends": True}
        yield LayerCall("topk_indices", (PREFILL,), "indexer", {**top, "row_starts": True})
        yield LayerCall("topk_indices", (DECODE,), "indexer", top)


def _products(model: Description, setting: Setting) -> Iterator[LayerCall]:
    """Products with quantised weights, and what quantises before them."""
    if model.linear == PLAIN:
        return
    for layer, n, k, bias in linear_layers(model, setting):
        facets = {"n": n, "k": k, "out_dtype": setting.dtype, "bias": bias}
        if model.linear == NVFP4:
            yield LayerCall("quantize_nvfp4", BOTH, layer, {"dtype": setting.dtype, "static": True}, {"width": k})
            for phase, rows in ((PREFILL, MANY), (DECODE, "few")):
                coded = {**facets, "a_format": NVFP4, "b_format": NVFP4, "rows": rows}
                yield LayerCall("fp4_gemm", (phase,), layer, coded)
            continue
        granularity = _GRANULARITY[model.linear]
        quantized = {"dtype": setting.dtype, "granularity": granularity}
        yield LayerCall("quantize_fp8", BOTH, layer, quantized, {"width": k})
        for phase, rows in ((PREFILL, MANY), (DECODE, "few")):
            scaled = {**facets, "scaling": _SCALING[model.linear], "rows": rows}
            yield LayerCall("fp8_gemm", (phase,), layer, scaled)


def linear_layers(model: Description, setting: Setting) -> Iterator[tuple[str, int, int, bool]]:
    """Name, outputs, inputs and bias of each linear layer, as one rank holds it."""
    hidden, attention = model.hidden_size, model.attention
    if isinstance(attention, LatentAttention):
        heads = setting.share("num_attention_heads", attention.num_heads)
        wide = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        latent = attention.kv_lora_rank + attention.qk_rope_head_dim
        if attention.q_lora_rank is None:
            yield "q", heads * wide, hidden, False
        else:
            yield "q_a and kv_a", attention.q_lora_rank + latent, hidden, False
            yield "q_a", attention.q_lora_rank, hidden, False
            yield "q_b", heads * wide, attention.q_lora_rank, False
        yield "kv_a", latent, hidden, False
        yield "kv_b", heads * (attention.qk_nope_head_dim + attention.v_head_dim), attention.kv_lora_rank, False
        yield "o", hidden, heads * attention.v_head_dim, False
        if attention.indexer is not None and attention.q_lora_rank is not None:
            yield "indexer q", attention.indexer.num_heads * attention.indexer.head_dim, attention.q_lora_rank, False
            yield "indexer k", attention.indexer.head_dim, hidden, False
    else:
        heads = setting.share("num_attention_heads", attention.num_q_heads)
        repeated = setting.tp > attention.num_kv_heads and setting.tp % attention.num_kv_heads == 0
        kv_heads = 1 if repeated else setting.share("num_key_value_heads", attention.num_kv_heads)
        yield "qkv", (heads + 2 * kv_heads) * attention.head_dim, hidden, model.bias
        yield "o", hidden, heads * attention.head_dim, False
    if model.intermediate_size:
        inner = _padded(setting.share("intermediate_size", model.intermediate_size), model.linear)
        yield ("gate_up", 2 * inner, hidden, False) if model.gated else ("up", inner, hidden, model.bias)
        yield "down", hidden, inner, False
    if model.experts is not None and model.experts.shared_size:
        inner = _padded(setting.share("the shared expert's width", model.experts.shared_size), model.linear)
        yield "shared gate_up", 2 * inner, hidden, False
        yield "shared down", hidden, inner, False


def _experts(experts: Experts, model: Description, setting: Setting) -> Iterator[LayerCall]:
    """Routing, which every rank does in full, and the experts that one rank has."""
    yield LayerCall(
        "route_experts",
        BOTH,
        "router",
        {
            "dtype": "float32",
            "num_experts": experts.num_experts,
            "top_k": experts.top_k,
            "num_groups": experts.num_groups,
            "topk_groups": experts.topk_groups,
            "scoring": experts.scoring,
            "correction_bias": experts.correction_bias,
            "renormalize": experts.renormalize,
            "scaling_factor": experts.scaling_factor != 1.0,
        },
    )
    if experts.num_experts % setting.ep:
        raise ConfigurationError(
            f"num_experts is {experts.num_experts}, which {setting.ep} ranks cannot share evenly; choose another ep"
        )
    width = experts.intermediate_size
    width = width if setting.ep > 1 else setting.share("the experts' width", width)
    for phases, rows in ((BOTH, "few"), ((PREFILL,), MANY)):
        yield LayerCall(
            "fused_moe",
            phases,
            "experts",
            {
                "rows": rows,
                "dtype": setting.dtype,
                "weights": experts.weights,
                "activation_dtype": FP8 if experts.weights in _FP8 else setting.dtype,
                "num_experts": experts.num_experts // setting.ep,
                "top_k": experts.top_k,
                "hidden_size": model.hidden_size,
                "intermediate_size": _padded(width, experts.weights, whole_blocks=True),
                "activation": experts.activation,
                "w13_bias": experts.bias,
                "w2_bias": experts.bias,
                "expert_map": setting.ep > 1,
            },
            {"global_experts": experts.num_experts} if setting.ep > 1 else {},
        )


def _padded(width: int, weights: str, whole_blocks: bool = False) -> int:
    """A rank's share of a width, padded to whole groups of its format, and for experts to whole blocks."""
    multiple = 128 if weights == FP8_BLOCK and whole_blocks else _GROUPS.get(weights, 1)
    return -(-width // multiple) * multiple
