"""FlashInfer's mixture of experts of torch on a CPU: up before gate, repeated choices dropped, its own roundings."""

from __future__ import annotations

import torch

from kernelhub.ops.precision import without_autocast
from tests.backends import flashinfer_codes_fake as of_codes
from tests.backends import flashinfer_mixed_fake as mixed
from tests.backends.fake.addresses import check_small

E4M3 = torch.float8_e4m3fn


def by_reciprocals(rows):
    """Rows as float8 by 1 x 128 means them: `scale_1x128_kernel` of the library."""
    groups = rows.float().unflatten(1, (-1, 128))
    largest = groups.abs().amax(2, keepdim=True)
    factor = torch.where(largest > 0, 448 / largest, 1.0)
    return ((groups * factor).clamp(-448, 448).to(E4M3).float() * (1 / factor)).flatten(1)


@without_autocast  # which compiled code does not meet
def cutlass_fused_moe(
    input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output_dtype,
    quant_scales, output=None, use_fused_finalize=True, use_w4_group_scaling=False, fc1_expert_biases=None,
    fc2_expert_biases=None, swiglu_alpha=None, swiglu_beta=None, swiglu_limit=None, use_deepseek_fp8_block_scale=False,
    input_sf=None, swizzled_input_sf=True, use_mxfp8_act_scaling=False,
):  # fmt: skip
    if input_sf is not None:
        assert not use_fused_finalize, "sums by atomics differ from run to run"
        of_codes.cutlass(locals())
        return [output]
    ids, weights, w31, w2 = token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights
    for tensor in (input, ids, weights, w31, w2, output):
        assert tensor.is_contiguous(), "pointers are read"
    for tensor in (input, w31, w2, output):
        assert tensor.data_ptr() % 16 == 0, "16 bytes"
    assert output.data_ptr() != input.data_ptr(), "tokens are read while results are written"
    assert ids.dtype is torch.int32
    assert weights.dtype is torch.float32
    assert not use_fused_finalize, "sums by atomics differ from run to run"
    assert output.dtype is output_dtype
    experts, inner = w31.shape[0], w31.shape[1] // 2
    biases = (fc1_expert_biases, fc2_expert_biases)
    controls = (swiglu_alpha, swiglu_beta, swiglu_limit)
    if use_w4_group_scaling:
        assert w31.dtype is w2.dtype is torch.uint8
        assert w31.shape[2] % 64 == w2.shape[2] % 64 == 0
        w31, w2 = (mixed.in_floats(*pair) for pair in zip((w31, w2), quant_scales, strict=True))
        quant_scales = []
        for item in (*biases, *controls):
            if item is not None:
                assert item.is_contiguous()
                assert item.dtype is (output_dtype if item.ndim == 2 else torch.float32)
        assert (biases[0] is None) is (biases[1] is None)
    if use_deepseek_fp8_block_scale:
        assert input.dtype is output_dtype is torch.bfloat16
        assert all(scale.dtype is torch.float32 and scale.is_contiguous() for scale in quant_scales)
        w31, w2 = (
            of.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
            for of, scale in zip((w31, w2), quant_scales, strict=True)
        )
        quant_scales, input = [], by_reciprocals(input)
    assert w2.shape == (experts, w31.shape[2], inner)
    static = input.dtype is E4M3
    fc1 = fc2 = None
    if static:
        fc1, quant, fc2, dequant = quant_scales
        check_small(*quant_scales)
        assert fc1.shape == fc2.shape == (experts,)
        assert quant.ndim == dequant.ndim == 0
    else:
        assert not quant_scales
        assert use_deepseek_fp8_block_scale or input.dtype is output_dtype
        assert use_deepseek_fp8_block_scale or use_w4_group_scaling or w31.dtype is w2.dtype is output_dtype
    result = torch.zeros(output.shape)
    for expert in range(experts):
        for token, choices in enumerate((ids == expert).tolist()):
            if True not in choices:
                continue
            factor = weights[token, choices.index(True)]  # the first; those that follow are lost
            both = input[token].float() @ w31[expert].float().t()
            if static:
                both = both * fc1[expert]
            both = both.to(output_dtype).float()
            up, gate = (both if biases[0] is None else both + biases[0][expert].float()).chunk(2)
            if swiglu_limit is not None:
                limit = swiglu_limit[expert]
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + swiglu_beta[expert]
            alpha = 1.0 if swiglu_alpha is None else swiglu_alpha[expert]
            joined = (gate * (alpha * gate).sigmoid() * up).to(output_dtype)
            if static:
                joined = (joined.float() * quant).clamp(-448, 448).to(E4M3)
                down = joined.float() @ w2[expert].float().t() * fc2[expert]
            elif use_deepseek_fp8_block_scale:
                down = by_reciprocals(joined[None])[0] @ w2[expert].t()
            else:
                down = joined.float() @ w2[expert].float().t()
            if biases[1] is not None:
                down = down.to(output_dtype).float() + biases[1][expert].float()
            result[token] += factor * down.to(output_dtype).float()
    output.copy_(result)
    return [output]


def cutlass_fused_moe_workspace_size(
    max_num_tokens, hidden_size, intermediate_size, num_experts_total, top_k, *, x_dtype, weight_dtype, output_dtype,
    use_fused_finalize, device, use_w4_group_scaling=False, use_deepseek_fp8_block_scale=False,
    use_mxfp8_act_scaling=False,
):  # fmt: skip
    assert not use_fused_finalize
    return 2 * max_num_tokens * top_k * (hidden_size + 2 * intermediate_size)


FUNCTIONS = (cutlass_fused_moe, cutlass_fused_moe_workspace_size)
