"""TensorRT-LLM's experts as FlashInfer has them, of torch on a CPU: weights are read where its kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.backends import flashinfer_codes_fake as of_codes
from tests.backends.flashinfer_products_fake import at_their_places

E4M3 = torch.float8_e4m3fn
# Where a row of 32 goes, as the library's table has it.
MAP = [0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27, 4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15,
       23, 31]  # fmt: skip
CODES = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])


def place_of(row: int) -> int:
    return row // 32 * 32 + MAP[row % 32]


def rows_in_order(shuffled: Tensor) -> Tensor:
    """Rows [N, ...] of one expert as they were."""
    return shuffled[[place_of(row) for row in range(len(shuffled))]]


def joined(both: Tensor, alpha=None, beta=None, limit=None) -> Tensor:
    """Up and gate in turn [2I], in float32."""
    up, gate = both[0::2], both[1::2]
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * (1.0 if alpha is None else alpha)) * (up + (0.0 if beta is None else beta))


def check_sizes(x, num_experts, top_k, intermediate_size, n_group, topk_group, offset, local, scaling, method, output):
    assert x.is_contiguous(), "pointers are read"
    assert x.data_ptr() % 16 == 0
    assert output.is_contiguous()
    assert output.dtype is torch.bfloat16
    assert output.shape[0] == x.shape[0]
    assert output.shape[1] % 8 == 0
    assert output.shape[1] <= x.shape[1]
    assert output.data_ptr() != x.data_ptr(), "tokens are read while results are written"
    assert num_experts % 4 == 0
    assert num_experts > top_k
    assert top_k <= 32
    assert (n_group, topk_group, offset, local, scaling) == (None, None, 0, num_experts, None)
    assert method == 1
    assert intermediate_size % 128 == x.shape[1] % 128 == 0


def choices_of(topk_ids, tokens: int, top_k: int, experts: int) -> list[list[tuple[int, int]]]:
    """Of each token, experts and places; of an expert that is chosen twice one place is lost, any of them."""
    ids, weights = topk_ids
    for tensor, dtype in ((ids, torch.int32), (weights, torch.float32)):
        assert tensor.shape == (tokens, top_k)
        assert tensor.dtype is dtype
        assert tensor.is_contiguous()
    found = []
    for row in ids.tolist():
        places = {expert: place for place, expert in enumerate(row) if 0 <= expert < experts}
        found.append([(expert, place) for expert, place in sorted(places.items(), key=lambda item: item[1])])
    return found


def summed(topk_ids, x: Tensor, top_k: int, experts: int, output: Tensor, expert_gives) -> None:
    """Each expert's part in bfloat16, summed in float32 in the order of choices."""
    weights = topk_ids[1]
    for token, chosen in enumerate(choices_of(topk_ids, len(x), top_k, experts)):
        total = torch.zeros(1)
        for expert, place in chosen:
            total = total + weights[token, place] * expert_gives(expert, x[token]).bfloat16().float()
        output[token] = total[: output.shape[1]].bfloat16()  # of 0.6.18 on, narrower ones are filled


def trtllm_bf16_routed_moe(
    topk_ids, hidden_states, gemm1_weights, gemm2_weights, num_experts, top_k, n_group, topk_group, intermediate_size,
    local_expert_offset, local_num_experts, routed_scaling_factor=None, routing_method_type=0,
    use_shuffled_weight=True, weight_layout=2, output=None,
):  # fmt: skip
    sizes = (num_experts, top_k, intermediate_size, n_group, topk_group, local_expert_offset, local_num_experts)
    check_sizes(hidden_states, *sizes, routed_scaling_factor, routing_method_type, output)
    assert use_shuffled_weight
    assert weight_layout == 2
    hidden = hidden_states.shape[1]
    assert hidden_states.dtype is gemm1_weights.dtype is gemm2_weights.dtype is torch.bfloat16
    assert gemm1_weights.shape == (num_experts, hidden // 64, 2 * intermediate_size, 64)
    assert gemm2_weights.shape == (num_experts, intermediate_size // 64, hidden, 64)
    assert gemm1_weights.is_contiguous()
    assert gemm2_weights.is_contiguous()

    def matrix(blocks: Tensor) -> Tensor:
        return rows_in_order(torch.cat(list(blocks), 1)).float()

    def gives(expert: int, row: Tensor) -> Tensor:
        inner = joined(matrix(gemm1_weights[expert]) @ row.float()).bfloat16().float()
        return matrix(gemm2_weights[expert]) @ inner

    summed(topk_ids, hidden_states, top_k, num_experts, output, gives)
    return output


def trtllm_fp8_per_tensor_scale_routed_moe(
    topk_ids, routing_bias, hidden_states, gemm1_weights, output1_scales_scalar, output1_scales_gate_scalar,
    gemm2_weights, output2_scales_scalar, num_experts, top_k, n_group, topk_group, intermediate_size,
    local_expert_offset, local_num_experts, routed_scaling_factor, use_routing_scales_on_input, routing_method_type=0,
    output=None,
):  # fmt: skip
    sizes = (num_experts, top_k, intermediate_size, n_group, topk_group, local_expert_offset, local_num_experts)
    check_sizes(hidden_states, *sizes, routed_scaling_factor, routing_method_type, output)
    assert not use_routing_scales_on_input
    assert routing_bias is None
    assert hidden_states.dtype is gemm1_weights.dtype is gemm2_weights.dtype is E4M3
    for scale in (output1_scales_scalar, output1_scales_gate_scalar, output2_scales_scalar):
        assert scale.shape == (num_experts,)
        assert scale.dtype is torch.float32
        assert scale.is_contiguous()

    def gives(expert: int, row: Tensor) -> Tensor:
        both = rows_in_order(gemm1_weights[expert].view(torch.uint8)).view(E4M3).float() @ row.float()
        up, gate = both[0::2] * output1_scales_scalar[expert], both[1::2] * output1_scales_gate_scalar[expert]
        inner = (gate * gate.sigmoid() * up).clamp(-448, 448).to(E4M3).float()
        down = rows_in_order(gemm2_weights[expert].view(torch.uint8)).view(E4M3).float() @ inner
        return down * output2_scales_scalar[expert]

    summed(topk_ids, hidden_states, top_k, num_experts, output, gives)
    return output


def coded(values: Tensor) -> Tensor:
    """float8 by 128 columns, as values."""
    groups = values.unflatten(0, (-1, 128))
    scale = (groups.abs().amax(1, keepdim=True) / 448).clamp(min=2.0**-126)
    return ((groups / scale).clamp(-448, 448).to(E4M3).float() * scale).flatten()


def trtllm_fp8_block_scale_routed_moe(
    topk_ids, routing_bias, hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale, gemm2_weights,
    gemm2_weights_scale, num_experts, top_k, n_group, topk_group, intermediate_size, local_expert_offset,
    local_num_experts, routed_scaling_factor, routing_method_type=0, use_shuffled_weight=False, weight_layout=0,
    output=None, fp8_quantization_type=1,
):  # fmt: skip
    if fp8_quantization_type == 2:
        of_codes.trtllm_mxfp8(locals())
        return output
    sizes = (num_experts, top_k, intermediate_size, n_group, topk_group, local_expert_offset, local_num_experts)
    check_sizes(hidden_states, *sizes, routed_scaling_factor, routing_method_type, output)
    assert routing_bias is None
    assert (use_shuffled_weight, weight_layout, fp8_quantization_type) == (False, 0, 1)
    tokens, hidden = hidden_states.shape
    assert hidden_states.dtype is gemm1_weights.dtype is gemm2_weights.dtype is E4M3
    assert hidden_states_scale.shape == (hidden // 128, tokens)
    assert gemm1_weights_scale.shape == (num_experts, 2 * intermediate_size // 128, hidden // 128)
    assert gemm2_weights_scale.shape == (num_experts, hidden // 128, intermediate_size // 128)
    for scale in (hidden_states_scale, gemm1_weights_scale, gemm2_weights_scale):
        assert scale.dtype is torch.float32
        assert scale.is_contiguous()
    x = hidden_states.float() * hidden_states_scale.t().repeat_interleave(128, 1)

    def matrix(codes: Tensor, scale: Tensor) -> Tensor:
        return codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)

    def gives(expert: int, row: Tensor) -> Tensor:
        up, gate = coded(matrix(gemm1_weights[expert], gemm1_weights_scale[expert]) @ row).chunk(2)
        return matrix(gemm2_weights[expert], gemm2_weights_scale[expert]) @ coded(gate * gate.sigmoid() * up)

    summed(topk_ids, x, top_k, num_experts, output, gives)
    return output


def in_floats(codes: Tensor, exponents: Tensor) -> Tensor:
    """Codes [N, K / 2] in order and their exponents [N, K / 32] as float32."""
    nibbles = torch.stack([codes & 15, codes >> 4], 2).flatten(1).long()
    values = CODES[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)
    return values * (exponents.float() - 127).exp2().repeat_interleave(32, 1)


def trtllm_fp4_block_scale_routed_moe(
    topk_ids, routing_bias, hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale, gemm1_bias,
    gemm1_alpha, gemm1_beta, gemm1_clamp_limit, gemm2_weights, gemm2_weights_scale, gemm2_bias, output1_scale_scalar,
    output1_scale_gate_scalar, output2_scale_scalar, num_experts, top_k, n_group, topk_group, intermediate_size,
    local_expert_offset, local_num_experts, routed_scaling_factor, routing_method_type=0, output=None,
):  # fmt: skip
    if hidden_states_scale is not None:
        of_codes.trtllm(locals())
        return [output]
    sizes = (num_experts, top_k, intermediate_size, n_group, topk_group, local_expert_offset, local_num_experts)
    check_sizes(hidden_states, *sizes, routed_scaling_factor, routing_method_type, output)
    hidden = hidden_states.shape[1]
    assert hidden % 256 == intermediate_size % 256 == 0
    assert hidden_states.dtype is torch.bfloat16
    assert hidden_states_scale is routing_bias is None
    assert output1_scale_scalar is output1_scale_gate_scalar is output2_scale_scalar is None
    assert gemm1_weights.shape == (num_experts, 2 * intermediate_size, hidden // 2)
    assert gemm2_weights.shape == (num_experts, hidden, intermediate_size // 2)
    assert (gemm1_bias is None) is (gemm2_bias is None)
    for item in (gemm1_bias, gemm2_bias, gemm1_alpha, gemm1_beta, gemm1_clamp_limit):
        if item is not None:
            assert item.dtype is torch.float32
            assert item.is_contiguous()
            assert item.shape[0] == num_experts

    def matrix(codes: Tensor, tiles: Tensor) -> Tensor:
        assert codes.dtype is torch.uint8
        assert tiles.dtype is E4M3, "the library tells bytes of e8m0 by their number"
        assert tiles.is_contiguous()
        exponents = at_their_places(tiles.view(torch.uint8), *tiles.shape)
        return in_floats(rows_in_order(codes), rows_in_order(exponents))

    def at(tensor, expert: int):
        return None if tensor is None else tensor[expert]

    first = [matrix(*pair) for pair in zip(gemm1_weights, gemm1_weights_scale, strict=True)]
    second = [matrix(*pair) for pair in zip(gemm2_weights, gemm2_weights_scale, strict=True)]

    def gives(expert: int, row: Tensor) -> Tensor:
        both = first[expert] @ row.float()
        if gemm1_bias is not None:
            both = both + rows_in_order(gemm1_bias[expert])
        controls = (at(item, expert) for item in (gemm1_alpha, gemm1_beta, gemm1_clamp_limit))
        down = second[expert] @ joined(both, *controls).bfloat16().float()
        return down if gemm2_bias is None else down + rows_in_order(gemm2_bias[expert])

    summed(topk_ids, hidden_states, top_k, num_experts, output, gives)
    return [output]


def trtllm_mxint4_block_scale_routed_moe(
    topk_ids, hidden_states, gemm1_weights, gemm1_weights_scale, gemm1_alpha, gemm1_beta, gemm1_clamp_limit,
    gemm2_weights, gemm2_weights_scale, num_experts, top_k, n_group, topk_group, intermediate_size,
    local_expert_offset, local_num_experts, routed_scaling_factor, routing_method_type=0, output=None,
):  # fmt: skip
    sizes = (num_experts, top_k, intermediate_size, n_group, topk_group, local_expert_offset, local_num_experts)
    check_sizes(hidden_states, *sizes, routed_scaling_factor, routing_method_type, output)
    assert gemm1_alpha is gemm1_beta is gemm1_clamp_limit is None
    hidden = hidden_states.shape[1]
    assert hidden % 256 == intermediate_size % 256 == 0
    assert hidden_states.dtype is torch.bfloat16
    assert topk_ids.dtype is torch.int32, "an id and a weight in one number, and nothing else"
    assert topk_ids.shape == (len(hidden_states), top_k)
    assert topk_ids.is_contiguous()
    assert gemm1_weights.shape == (num_experts, hidden // 256, 2 * intermediate_size, 128)
    assert gemm2_weights.shape == (num_experts, intermediate_size // 256, hidden, 128)
    assert gemm1_weights_scale.numel() * 32 == num_experts * 2 * intermediate_size * hidden

    def matrix(blocks: Tensor, tiles: Tensor) -> Tensor:
        assert blocks.dtype is torch.uint8
        assert tiles.dtype is torch.bfloat16
        assert blocks.is_contiguous()
        assert tiles.is_contiguous()
        codes = torch.cat(list(blocks), 1)
        nibbles = torch.stack([codes & 15, codes >> 4], 2).flatten(1).int()
        values = torch.where(nibbles >= 8, nibbles - 16, nibbles).float()
        bits = tiles.view(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
        low, high = (at_their_places(half.contiguous(), *tiles.shape) for half in bits)
        scale = torch.stack([low, high], 2).flatten(1).view(torch.bfloat16)
        # One after the other: bfloat16 holds no product of a code and a scale.
        return rows_in_order(values) * rows_in_order(scale).float().repeat_interleave(32, 1)

    first = [matrix(*pair) for pair in zip(gemm1_weights, gemm1_weights_scale, strict=True)]
    second = [matrix(*pair) for pair in zip(gemm2_weights, gemm2_weights_scale, strict=True)]

    def gives(expert: int, row: Tensor) -> Tensor:
        return second[expert] @ joined(first[expert] @ row.float()).bfloat16().float()

    weights = (topk_ids & 0xFFFF).to(torch.int16).view(torch.bfloat16).float()
    summed((topk_ids >> 16, weights), hidden_states, top_k, num_experts, output, gives)
    return [output]


FUNCTIONS = (
    trtllm_fp8_block_scale_routed_moe,
    trtllm_bf16_routed_moe,
    trtllm_fp8_per_tensor_scale_routed_moe,
    trtllm_fp4_block_scale_routed_moe,
    trtllm_mxint4_block_scale_routed_moe,
)
