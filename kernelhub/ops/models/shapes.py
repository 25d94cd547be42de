"""The shapes of published models as the inputs of each family of ops take them, from the one table of models.

GLM-5 is published in bfloat16 and, as GLM-5-FP8, in blocks of fp8; here it is the latter.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.ops.models.description import FP8_BLOCK, MXFP4, NVFP4, PLAIN, Attention, Experts, LatentAttention
from kernelhub.ops.models.layers import Setting, linear_layers
from kernelhub.ops.models.published import describe


@dataclass(frozen=True)
class AttentionModel:
    """The attention of one layer.

    Attributes:
        name: the model.
        num_q_heads: query heads of the whole model, before tensor parallelism.
        num_kv_heads: KV heads.
        head_dim_qk: width of a head of q and k.
        head_dim_vo: width of a head of v.
        window: keys before its own position that a query of a windowed layer sees, one fewer than sliding_window, which
            counts its own; None for none.
        softcap: bound of the scores; None for none.
        sinks: whether heads have a sink.
    """

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True)
class MlaModel:
    """The latent attention of one layer.

    Attributes:
        name: the model.
        num_heads: query heads of the whole model, before tensor parallelism.
        kv_lora_rank: width of the latent.
        qk_rope_head_dim: width of the rotary part.
        qk_nope_head_dim: width of a head's non-rotary part of a key, before absorption.
        index_topk: tokens that a query of sparse attention sees; None for all.
    """

    name: str
    num_heads: int
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 128
    index_topk: int | None = None

    @property
    def scale(self) -> float:
        """One over the root of a head's width before absorption.

        DeepSeek and Kimi K2 multiply it by the square of YaRN's mscale, 1 + 0.1 ln(factor), which changes no shape and
        is left out; GLM-5 has no YaRN.
        """
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)


@dataclass(frozen=True)
class IndexerModel:
    """The indexer of sparse latent attention: its heads, their width, and the tokens that it selects."""

    name: str
    num_heads: int
    head_dim: int
    k: int


@dataclass(frozen=True)
class LinearModel:
    """The linear attention of one layer.

    Figures are num_attention_heads and head_dim of its config.json, also in the model card of MiniMax-Text-01 and
    by table 1 of the report on Ring-linear-2.0 (arXiv 2510.19338). k and v have as many heads as q: num_key_value_heads
    is that of the softmax layers between.

    Attributes:
        name: the model.
        num_heads: heads of the whole model, before tensor parallelism.
        head_dim: width of a head of q and k.
        value_dim: width of a head of v.
    """

    name: str
    num_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class LinearLayer:
    """One linear layer in float8.

    Attributes:
        name: the model, the layer, and after a slash the ranks that share it.
        n: outputs.
        k: inputs.
        scaling: how its float8 checkpoint is scaled, as of `fp8_gemm`: block where its makers' own is (GLM-5-FP8,
            Qwen3-30B-A3B-FP8), else row, as quantised by others.
    """

    name: str
    n: int
    k: int
    scaling: str


@dataclass(frozen=True)
class Fp4Layer:
    """One linear layer in float4, before tensor parallelism.

    Attributes:
        name: the model and the layer.
        n: outputs.
        k: inputs.
        b_format: of a published checkpoint in float4: MXFP4 that of gpt-oss (its experts), NVFP4 those that others
            quantised. Of GLM-5 and MiniMax M2.5 these hold the experts so and leave attention in bfloat16 (model cards
            of lukealonso/GLM-5-NVFP4 and mconcat/MiniMax-M2.5-NVFP4), of DeepSeek-V3.2 and Llama 3.1 70B attention too
            (eousphoros/DeepSeek-V3.2-NVFP4, JongYeop/Llama-3.1-70B-Instruct-NVFP4-W4A4).
    """

    name: str
    n: int
    k: int
    b_format: str


@dataclass(frozen=True)
class AbsorbedProjection:
    """One projection of latent attention that is absorbed into its queries or results (DeepSeek-V2, section 2.1).

    Attributes:
        name: the model and the projection.
        heads: matrices.
        n: outputs of each.
        k: inputs of each.
    """

    name: str
    heads: int
    n: int
    k: int


@dataclass(frozen=True)
class ExpertModel:
    """The experts of one layer as operands of grouped products.

    Attributes:
        name: the model.
        hidden: width of a token.
        intermediate: width within an expert.
        num_experts: routed experts of a layer.
        top_k: experts that a token is sent to.
        bias: whether experts have biases.
        format: how a checkpoint of its makers holds the experts: ``"bfloat16"``, ``"block"`` (fp8), ``"mxfp4"``; or
            of `grouped.inputs.PAIRS`, what tokens are quantised to as well.
    """

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    bias: bool = False
    format: str = "bfloat16"

    @property
    def w13(self) -> tuple[int, int]:
        """(N, K) of gate and up projection in one."""
        return 2 * self.intermediate, self.hidden

    @property
    def w2(self) -> tuple[int, int]:
        """(N, K) of the down projection."""
        return self.hidden, self.intermediate


@dataclass(frozen=True)
class MoeModel:
    """One mixture-of-experts layer.

    Attributes:
        name: the model.
        num_experts: routed experts of the layer.
        top_k: experts that a token goes to.
        hidden_size: width of a token.
        intermediate_size: width of an expert, before tensor parallelism.
        scoring: as of `route_experts`.
        num_groups, topk_groups: of a grouped routing.
        correction_bias: whether experts have a bias that only choosing sees.
        renormalize: whether the selected weights are divided by their sum.
        scaling_factor: what weights are multiplied by.
        activation: as of `fused_moe`.
        bias: whether experts have biases.
        weights: a format that its makers publish it in, as of `fused_moe`'s facet.
    """

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    scoring: str = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    correction_bias: bool = False
    renormalize: bool = True
    scaling_factor: float = 1.0
    activation: str = "silu"
    bias: bool = False
    weights: str = "plain"


def hidden_size(model: str) -> int:
    """Width of a token of a published model."""
    return describe(model).hidden_size


def _attention(model: str) -> AttentionModel:
    """The layers with the most features: of models whose layers alternate, those with a window."""
    figures = describe(model).attention
    if isinstance(figures, LatentAttention):  # in prefill, with keys of each head
        width = figures.qk_nope_head_dim + figures.qk_rope_head_dim
        return AttentionModel(f"{model} prefill", figures.num_heads, figures.num_heads, width, figures.v_head_dim)
    heads = figures.num_q_heads, figures.num_kv_heads, figures.head_dim, figures.head_dim
    return AttentionModel(model, *heads, figures.window or None, figures.softcap, figures.sinks)


def _latent(model: str) -> LatentAttention:
    attention = describe(model).attention
    assert not isinstance(attention, Attention), f"{model} has no latent attention"
    return attention


def _mla(model: str) -> MlaModel:
    figures = _latent(model)
    topk = figures.indexer.topk if figures.indexer else None
    widths = figures.kv_lora_rank, figures.qk_rope_head_dim, figures.qk_nope_head_dim
    return MlaModel(model, figures.num_heads, *widths, topk)


def _indexer(model: str) -> IndexerModel:
    indexer = _latent(model).indexer
    assert indexer is not None, f"{model} has no indexer"
    return IndexerModel(model, indexer.num_heads, indexer.head_dim, indexer.topk)


def _experts(model: str) -> tuple[int, Experts]:
    described = describe(model)
    assert described.experts is not None, f"{model} has no experts"
    return described.hidden_size, described.experts


def _moe(model: str) -> MoeModel:
    hidden, experts = _experts(model)
    figures = {name: value for name, value in vars(experts).items() if name != "shared_size"}
    return MoeModel(model, hidden_size=hidden, **figures)


def _grouped(model: str, format: str | None = None) -> ExpertModel:
    hidden, experts = _experts(model)
    name = f"{model}-{NVFP4}" if format else model
    published = {PLAIN: "bfloat16", FP8_BLOCK: "block", MXFP4: "mxfp4"}[experts.weights]
    sizes = hidden, experts.intermediate_size, experts.num_experts, experts.top_k
    return ExpertModel(name, *sizes, experts.bias, format or published)


def _shape(name: str) -> tuple[int, int]:
    """Outputs and inputs of a layer that is named as `LinearLayer` names it."""
    model, _, layer = name.partition(" ")
    layer, _, ranks = layer.partition(" / ")
    if layer == "expert gate_up":
        return _grouped(model).w13
    setting = Setting(int(ranks or 1), 1, "bfloat16", "bfloat16", 16)
    return next((n, k) for found, n, k, _ in linear_layers(describe(model), setting) if found == layer)


def _absorbed(model: str) -> tuple[AbsorbedProjection, ...]:
    figures = _latent(model)
    return (
        AbsorbedProjection(f"{model} q to latent", figures.num_heads, figures.kv_lora_rank, figures.qk_nope_head_dim),
        AbsorbedProjection(f"{model} latent to v", figures.num_heads, figures.v_head_dim, figures.kv_lora_rank),
    )


ATTENTION = {
    model.name: model
    for model in map(
        _attention,
        (
            "llama-3.1-8b",
            "llama-3.1-70b",
            "qwen3-30b-a3b",
            "mistral-7b-v0.1",
            "gemma-2-9b",
            "gpt-oss-120b",
            "phi-2",
            "deepseek-v3.2",
        ),
    )
}
MLA = {name: _mla(name) for name in ("deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2", "kimi-k2", "glm-5")}
INDEXERS = {name: _indexer(name) for name in ("deepseek-v3.2", "glm-5")}
# Models of which no more is known here than their linear attention.
LINEAR_ATTENTION = {
    model.name: model
    for model in (
        LinearModel("minimax-text-01", 64, 128, 128),
        LinearModel("ring-flash-linear-2.0", 32, 128, 128),
        LinearModel("ring-mini-linear-2.0", 16, 128, 128),
    )
}
FP8_LAYERS = {
    name: LinearLayer(name, *_shape(name), "row" if name.startswith("llama") else "block")
    for name in (
        *(f"llama-3.1-70b {layer}" for layer in ("qkv", "o", "gate_up", "down")),
        *(f"qwen3-30b-a3b {layer}" for layer in ("qkv", "o")),
        *(f"deepseek-v3.2 {layer}" for layer in ("kv_a", "q_b", "o", "down", "gate_up / 8", "down / 8")),
        "glm-5 o",
        "minimax-m2.5 o",
    )
}
FP4_LAYERS = {
    name: Fp4Layer(name, *_shape(name), MXFP4 if name.startswith("gpt-oss") else NVFP4)
    for name in (
        *(f"llama-3.1-70b {layer}" for layer in ("qkv", "gate_up", "down")),
        "qwen3-30b-a3b qkv",  # not verified: that a checkpoint holds attention in NVFP4
        *(f"deepseek-v3.2 {layer}" for layer in ("shared gate_up", "o")),
        *(f"{model} expert gate_up" for model in ("glm-5", "minimax-m2.5", "gpt-oss-120b")),
    )
}
ABSORBED = {made.name: made for model in ("deepseek-v3.2", "glm-5") for made in _absorbed(model)}
GROUPED = {
    model.name: model
    for model in (
        *map(_grouped, ("qwen3-30b-a3b", "deepseek-v3.2", "glm-5", "minimax-m2.5", "gpt-oss-120b")),
        # lukealonso/GLM-5-NVFP4, with tokens quantised as its weights are, as tensor cores of sm_100 take them.
        _grouped("glm-5", "nvfp4 x nvfp4"),
    )
}
MOE = {
    name: _moe(name)
    for name in (
        "mixtral-8x7b",
        "qwen3-30b-a3b",
        "deepseek-v2",
        "deepseek-v3.2",
        "glm-5",
        "minimax-m2.5",
        "gpt-oss-120b",
    )
}
