"""The features of ops that a model can use, so that an error can say whether a model's warm-up covers a call.

tests/warming/test_warmup.py compares the table with all published models.
"""

from __future__ import annotations

from typing import Any

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import CHECKPOINT, WEIGHT_LAYOUT

FEATURES: dict[str, frozenset[str]] = {
    "attention": frozenset({"causal", "ragged", "sinks", "softcap", "window_left"}),
    "paged_attention": frozenset({"causal", "kv_scale=value", "ragged", "sinks", "softcap", "window_left"}),
    "mla_attention": frozenset({"causal", "kv_scale=value", "ragged", "sparse"}),
    "write_mla_cache": frozenset({"kv_scale=value"}),
    "concat_mla_k": frozenset(),
    "mqa_logits": frozenset({"k_scale"}),
    "paged_mqa_logits": frozenset({"k_scale"}),
    "topk_indices": frozenset({"row_ends", "row_starts"}),
    "quantize_fp8": frozenset({"column"}),
    "quantize_nvfp4": frozenset({"static"}),
    "fp8_gemm": frozenset({"bias"}),
    "fp4_gemm": frozenset({"bias"}),
    "bmm_fp8": frozenset(),
    "route_experts": frozenset(
        {"correction_bias", "renormalize", "scaling_factor", "scoring=sigmoid", "scoring=softmax_after_topk"}
    ),
    "fused_moe": frozenset({"activation=swiglu_oai", "expert_map", "w13_bias", "w2_bias"}),
}
_PREFILL_IS_RAGGED = ("attention",)  # a model uses it for packed sequences only


def a_model_may_ask(contract: OpRecord[Any], problem: Any) -> bool:
    """Whether some model's `problems_of`, in the forms of a warm-up, could list a problem of this kind."""
    known = FEATURES.get(contract.name)
    if known is None or getattr(problem, WEIGHT_LAYOUT, CHECKPOINT) != CHECKPOINT:
        return False
    used = contract.schema.features_used(problem)
    return known.issuperset(used) and (contract.name not in _PREFILL_IS_RAGGED or "ragged" in used)
