"""vLLM's Triton experts by kernelhub's `fused_moe`; this module imports vLLM.

The method `apply` of vLLM's class TritonExperts is replaced, and its property `expects_unquantized_inputs`: kernelhub
quantises activations itself. Covered are experts without quantisation, float8 weights in blocks of 128 x 128, and
float8 weights with a scale per channel and activations with one per token; SiLU and GELU; expert parallelism with a
map. All others run as before, subclasses of TritonExperts too.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

from kernelhub.compat.start import Rows
from kernelhub.compat.vllm.start import ENGINE, follow
from kernelhub.errors import NotWarmed
from kernelhub.ops.moe.experts.op import fused_moe

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
GROUP = 128


def covered(experts: Any) -> bool:
    """Whether kernelhub runs these experts, by what their layer sets when vLLM makes it."""
    if type(experts) is not TritonExperts or getattr(experts, "quantization_emulation", False):
        return False
    activation = getattr(experts.moe_config, "activation", None)
    if getattr(activation, "value", activation) not in ACTIVATIONS:
        return False
    parallel = getattr(experts.moe_config, "moe_parallel_config", None)
    if getattr(experts, "_lora_context", None) is not None or getattr(experts, "post_gemm2_hook", None) is not None:
        return False
    if getattr(parallel, "use_all2all_kernels", False) or os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1":
        return False
    bounded = getattr(getattr(experts, "activation_config", None), "clamp_limit", None)
    if bounded is not None or getattr(experts, "gemm1_clamp_limit", None) is not None:
        return False
    scales = experts.w1_scale, experts.w2_scale
    if experts.quant_dtype is None:
        return scales == (None, None)
    if experts.quant_dtype is not torch.float8_e4m3fn or not all(isinstance(scale, Tensor) for scale in scales):
        return False
    if getattr(experts, "a1_scale", None) is not None:  # static scales of activations
        return False
    if experts.block_shape is not None:
        return list(experts.block_shape) == [GROUP, GROUP]
    return bool(experts.per_act_token_quant) and all(scale.ndim == 3 and scale.shape[2] == 1 for scale in scales)


def install(hook: str) -> None:
    """Replace vLLM's method, once."""
    plain = TritonExperts.apply
    if hasattr(plain, "_plain"):
        return
    inputs = TritonExperts.expects_unquantized_inputs

    def apply(
        self: Any,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        name = getattr(activation, "value", activation)
        if not covered(self):
            plain(
                self,
                *(output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map),
                *(a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input),
            )
            return
        weights = topk_weights.float()
        if apply_router_weight_on_input:  # vLLM has multiplied the tokens already
            weights = torch.ones_like(weights)
        run(self, output, hidden_states, w1, w2, weights, topk_ids.to(torch.int32), name, expert_map)

    apply._plain = plain  # type: ignore[attr-defined]
    TritonExperts.apply = apply
    TritonExperts.expects_unquantized_inputs = property(
        lambda self: (covered(self) and self.quant_dtype is not None) or inputs.fget(self)
    )
    ENGINE.noted.at_first(follow)


def run(
    experts: Any,
    output: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    activation: str,
    expert_map: Tensor | None,
) -> None:
    """The experts of a step by kernelhub; a call that the warm-up did not cover is logged and runs."""
    named = {
        "activation": activation,
        "expert_map": expert_map,
        "w13_scale": experts.w1_scale,
        "w2_scale": experts.w2_scale,
        "w13_bias": experts.w1_bias,
        "w2_bias": experts.w2_bias,
    }
    biased = named["w13_bias"] is not None
    form = w1.shape, w2.shape, w1.dtype, x.dtype, ids.shape[1], activation, expert_map is None, biased
    ENGINE.noted.note(form, lambda: _rows(x, w1, w2, ids.shape[1], named))

    def call() -> None:
        fused_moe(x, w1, w2, weights, ids, **named, out=output)

    try:
        call()
    except NotWarmed as error:
        ENGINE.serve(call, error)


def _rows(x: Tensor, w1: Tensor, w2: Tensor, top_k: int, named: dict[str, Any]) -> Rows:
    dtype, hidden, device = x.dtype, x.shape[1], x.device
    every = w1.shape[0] if named["expert_map"] is None else named["expert_map"].shape[0]

    def arguments(tokens: int) -> dict[str, Any]:
        ids = torch.arange(tokens * top_k, dtype=torch.int32, device=device).remainder_(every).view(tokens, top_k)
        rows = torch.zeros(tokens, hidden, dtype=dtype, device=device)
        weights = torch.full((tokens, top_k), 1 / top_k, dtype=torch.float32, device=device)
        called = {"x": rows, "w13": w1, "w2": w2, "topk_weights": weights, "topk_ids": ids, **named}
        return {**called, "out": torch.empty_like(rows)}

    return Rows(fused_moe, [f"fused_moe, {w1.shape[0]} experts of {w2.shape[2]}"], arguments)
