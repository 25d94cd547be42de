"""Both ops give what the modeling code of Hugging Face transformers gives, for the models it has."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 9, 32, 24, 16, 4
ROUTED = {"norm_topk_prob": True, "n_routed_experts": EXPERTS}
GROUPED = {"scoring": "sigmoid", "num_groups": 4, "topk_groups": 2, "renormalize": True, "scaling_factor": 2.5}

# family, class prefix, configuration, arguments of route_experts
MODELS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    (
        "deepseek_v3",
        "DeepseekV3",
        {
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_routed_experts": EXPERTS,
        },
        GROUPED,
    ),
    (
        "glm4_moe",
        "Glm4Moe",
        {
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "n_routed_experts": EXPERTS,
        },
        {"scoring": "sigmoid", "num_groups": 1, "topk_groups": 1, "renormalize": True, "scaling_factor": 1.5},
    ),
    ("qwen3_moe", "Qwen3Moe", {"num_experts": EXPERTS, "norm_topk_prob": True}, {"renormalize": True}),
    ("qwen3_moe", "Qwen3Moe", {"num_experts": EXPERTS, "norm_topk_prob": False}, {"renormalize": False}),
    ("mixtral", "Mixtral", {"num_local_experts": EXPERTS}, {"renormalize": True}),
    ("gpt_oss", "GptOss", {"num_local_experts": EXPERTS}, {"scoring": "softmax_after_topk"}),
]
_IDS = [f"{prefix}{index}" for index, (_, prefix, _, _) in enumerate(MODELS)]


@pytest.mark.parametrize(("family", "prefix", "figures", "routing"), MODELS, ids=_IDS)
def test_a_layer_gives_what_its_modeling_code_gives(
    family: str, prefix: str, figures: dict[str, Any], routing: dict[str, Any]
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: 6 cases")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    router_type = getattr(modeling, f"{prefix}TopKRouter", getattr(modeling, f"{prefix}TopkRouter", None))
    experts_type = getattr(modeling, f"{prefix}Experts", None)
    if router_type is None or experts_type is None:
        pytest.skip(f"this transformers has no router or no experts of {family}: 1 case")
    config = getattr(modeling, f"{prefix}Config")(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        moe_intermediate_size=INNER,
        num_experts_per_tok=TOP_K,
        hidden_act="silu",
        **figures,
    )
    torch.manual_seed(1)
    router, experts = router_type(config), experts_type(config)
    for module in (router, experts):
        for parameter in (*module.parameters(), *module.buffers()):
            torch.nn.init.normal_(parameter, std=0.3)
    hidden = torch.randn(TOKENS, HIDDEN)
    with torch.no_grad():
        logits, want_weights, want_ids = router(hidden)
        want = experts(hidden, want_ids, want_weights)
        bias = getattr(router, "e_score_correction_bias", None)
        weights, ids = kernelhub.route_experts(logits, TOP_K, correction_bias=bias, **routing)
        got = kernelhub.fused_moe(hidden, *_weights(experts), weights, ids, **_more(experts))
    order, want_order = ids.sort(1), want_ids.sort(1)
    assert torch.equal(order.values, want_order.values.int())
    torch.testing.assert_close(
        weights.gather(1, order.indices), want_weights.gather(1, want_order.indices), rtol=2**-15, atol=1e-7
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def _weights(experts: Any) -> tuple[Tensor, Tensor]:
    """w13 and w2 as `fused_moe` takes them."""
    if not hasattr(experts, "gate_up_proj_bias"):
        return experts.gate_up_proj.detach(), experts.down_proj.detach()
    # gpt-oss: transposed, gate and up in turn
    both = experts.gate_up_proj.detach().transpose(1, 2)
    return torch.cat([both[:, 0::2], both[:, 1::2]], 1), experts.down_proj.detach().transpose(1, 2).contiguous()


def _more(experts: Any) -> dict[str, Any]:
    if not hasattr(experts, "gate_up_proj_bias"):
        return {}
    bias = experts.gate_up_proj_bias.detach()
    return {
        "activation": "swiglu_oai",
        "w13_bias": torch.cat([bias[:, 0::2], bias[:, 1::2]], 1),
        "w2_bias": experts.down_proj_bias.detach(),
        "alpha": experts.alpha,
        "limit": experts.limit,
    }
