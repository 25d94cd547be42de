"""The experts of published models; figures are those of their config.json and of the modeling code beside it.

GLM-5 is published in bfloat16 and, as GLM-5-FP8, in blocks of fp8; here it is the latter. MiniMax M2's config.json has
no routed_scaling_factor, nor does its modeling code scale; DeepSeek-V2's norm_topk_prob is false.
tests/ops/test_model_figures.py holds the figures against those configurations that transformers ships.
"""

from __future__ import annotations

from dataclasses import dataclass


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


MODELS = {
    model.name: model
    for model in (
        MoeModel("mixtral-8x7b", 8, 2, 4096, 14336),
        MoeModel("qwen3-30b-a3b", 128, 8, 2048, 768),
        MoeModel(
            "deepseek-v2",
            160,
            6,
            5120,
            1536,
            num_groups=8,
            topk_groups=3,
            renormalize=False,
            scaling_factor=16.0,
        ),
        MoeModel(
            "deepseek-v3.2",
            256,
            8,
            7168,
            2048,
            scoring="sigmoid",
            num_groups=8,
            topk_groups=4,
            correction_bias=True,
            scaling_factor=2.5,
            weights="fp8_block",
        ),
        MoeModel(
            "glm-5",
            256,
            8,
            6144,
            2048,
            scoring="sigmoid",
            correction_bias=True,
            scaling_factor=2.5,
            weights="fp8_block",
        ),
        MoeModel("minimax-m2.5", 256, 8, 3072, 1536, scoring="sigmoid", correction_bias=True, weights="fp8_block"),
        MoeModel(
            "gpt-oss-120b",
            128,
            4,
            2880,
            2880,
            scoring="softmax_after_topk",
            renormalize=False,
            activation="swiglu_oai",
            bias=True,
            weights="mxfp4",
        ),
    )
}
