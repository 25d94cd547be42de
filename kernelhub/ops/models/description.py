"""The parts of a decoder that matter to kernels: its attention, its linear layers, its experts."""

from __future__ import annotations

from dataclasses import dataclass

# The formats of the weights of linear layers and of experts.
PLAIN, FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK, NVFP4, MXFP4, MXINT4 = FORMATS = (
    "plain",
    "fp8_tensor",
    "fp8_channel",
    "fp8_block",
    "nvfp4",
    "mxfp4",
    "mxint4",
)


# Formats of experts only, beside linear layers that are not quantised.
EXPERTS_ALONE = (MXFP4, MXINT4)


@dataclass(frozen=True)
class Attention:
    """Attention over keys and values of each KV head.

    Attributes:
        num_q_heads, num_kv_heads, head_dim: of the whole model.
        windowed: which kinds of layer there are: with a limit on the keys before a query, without, or both.
        window: keys before its own position that a query of a windowed layer sees; 0 where no layer has a window.
        softcap: bound of the scores; None for none.
        sinks: whether heads have a sink.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    windowed: tuple[bool, ...] = (False,)
    window: int = 0
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True)
class Indexer:
    """DeepSeek-V3.2's indexer, which selects the tokens that a query of sparse latent attention sees."""

    num_heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True)
class LatentAttention:
    """Attention over one latent per token, from DeepSeek-V2.

    Attributes:
        num_heads: of the whole model.
        q_lora_rank: width that queries are compressed to; None if they are not.
        kv_lora_rank: width of the latent.
        qk_rope_head_dim, qk_nope_head_dim, v_head_dim: widths of a head's parts.
        indexer: None where queries see all tokens.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    indexer: Indexer | None = None


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer, their routing, and the one expert that all tokens share.

    Attributes:
        num_experts, top_k, intermediate_size: of the whole layer, before it is shared out.
        shared_size: width of the shared expert; 0 if there is none.
        scoring, num_groups, topk_groups, correction_bias, renormalize, scaling_factor: as of `route_experts`.
        activation, bias: as of `fused_moe`.
        weights: one of `FORMATS`.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_size: int = 0
    scoring: str = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    correction_bias: bool = False
    renormalize: bool = True
    scaling_factor: float = 1.0
    activation: str = "silu"
    bias: bool = False
    weights: str = PLAIN


@dataclass(frozen=True)
class Description:
    """A decoder.

    Attributes:
        name: of the model, or the path of its config.json.
        hidden_size: width of a token.
        attention: of its layers.
        intermediate_size: width of the layers without experts; 0 if there are none.
        gated: whether these have a gate.
        experts: None if no layer has any.
        linear: format of the weights of linear layers: one of `FORMATS`.
        bias: whether query, key and value projections have a bias.
    """

    name: str
    hidden_size: int
    attention: Attention | LatentAttention
    intermediate_size: int = 0
    gated: bool = True
    experts: Experts | None = None
    linear: str = PLAIN
    bias: bool = False
