"""FlashInfer's experts by tokens that are quantised in small groups, of torch on a CPU, with their own roundings."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.backends.flashinfer_products_fake import at_their_places

E4M3 = torch.float8_e4m3fn
VALUES = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
MIDDLES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def codes_in_floats(codes: Tensor) -> Tensor:
    nibbles = torch.stack([codes & 15, codes >> 4], 2).flatten(1).long()
    return VALUES[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)


def power(exponents: Tensor) -> Tensor:
    return (exponents.float() - 127).exp2()


def weight_in_floats(codes: Tensor, tiles: Tensor, group: int) -> Tensor:
    """Codes [N, K / 2] with their scales in tiles; of 16 codes those of e4m3, of 32 powers of two."""
    factors = at_their_places(tiles.view(torch.uint8), len(codes), 2 * codes.shape[1] // group)
    factors = factors.view(E4M3).float() if group == 16 else power(factors)
    return codes_in_floats(codes) * factors.repeat_interleave(group, 1)


def tokens_in_floats(codes: Tensor, scale: Tensor) -> Tensor:
    """NVFP4 without its second scale, or MXFP8; scales row by row."""
    assert codes.is_contiguous()
    assert scale.is_contiguous()
    if codes.dtype is E4M3:
        assert scale.numel() * 32 == codes.numel()
        return codes.float() * power(scale.view(torch.uint8)).repeat_interleave(32, 1)
    assert codes.dtype is torch.uint8
    assert scale.numel() * 8 == codes.numel()
    return codes_in_floats(codes) * scale.view(E4M3).float().repeat_interleave(16, 1)


def in_nvfp4(values: Tensor, inverse: Tensor) -> Tensor:
    """Quantised by reciprocals, a scale of 0 included, without the second scale, of which this is one over."""
    groups = values.float().unflatten(-1, (-1, 16))
    scale = (inverse * (groups.abs().amax(-1, keepdim=True) * (1 / 6))).clamp(max=448).to(E4M3).float()
    factor = torch.where(scale == 0, 0.0, 1 / (scale * (1 / inverse)))
    sizes = (groups * factor).abs()
    code = torch.searchsorted(MIDDLES, sizes.contiguous())
    tie = (sizes == MIDDLES[code.clamp(max=6)]) & (code % 2 == 1)  # to even
    return (VALUES[code + tie].copysign(groups) * scale).flatten(-2)


def in_mxfp8(values: Tensor) -> Tensor:
    groups = values.float().unflatten(-1, (-1, 32))
    scale = (groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-118) / 448).log2().ceil().exp2()
    return ((groups * (1 / scale)).clamp(-448, 448).to(E4M3).float() * scale).flatten(-2)


def at(tensor: Tensor | None, expert: int) -> Tensor | None:
    return None if tensor is None else tensor[expert]


def trtllm(given) -> None:
    """The arguments of the entry point by name; what joins gate and up is quantised from float32."""
    from tests.backends.flashinfer_trtllm_fake import check_sizes, joined, rows_in_order, summed

    codes, experts, output = given["hidden_states"], given["num_experts"], given["output"]
    nvfp4 = codes.dtype is torch.uint8
    group = 16 if nvfp4 else 32
    x = tokens_in_floats(codes, given["hidden_states_scale"])
    assert given["hidden_states_scale"].dtype is E4M3, "as which the library takes all scales"
    names = ("num_experts", "top_k", "intermediate_size", "n_group", "topk_group", "local_expert_offset")
    sizes = (*(given[name] for name in names), given["local_num_experts"], given["routed_scaling_factor"])
    check_sizes(x, *sizes, given["routing_method_type"], output)
    scales = [given[f"output{name}"] for name in ("1_scale_scalar", "1_scale_gate_scalar", "2_scale_scalar")]
    biases = [given[f"gemm{side}_bias"] for side in (1, 2)]
    controls = [given[f"gemm1_{name}"] for name in ("alpha", "beta", "clamp_limit")]
    if nvfp4:
        assert biases == [None, None], "they are multiplied by scales"
        assert controls == [None, None, None], "they are, too"
    else:
        assert scales == [None, None, None]
        assert codes.shape[1] % 256 == given["intermediate_size"] % 256 == 0
    for item in (*scales, *biases, *controls):
        if item is not None:
            assert item.dtype is torch.float32
            assert item.is_contiguous()
            assert item.shape[0] == experts
    weights = []
    for side in (1, 2):
        pairs = zip(given[f"gemm{side}_weights"], given[f"gemm{side}_weights_scale"], strict=True)
        assert given[f"gemm{side}_weights_scale"].dtype is E4M3
        weights.append([rows_in_order(weight_in_floats(*pair, group)) for pair in pairs])

    def gives(expert: int, row: Tensor) -> Tensor:
        both = weights[0][expert] @ row
        if nvfp4:
            up, gate = both[0::2] * scales[0][expert], both[1::2] * scales[1][expert]
            inner = in_nvfp4(gate * gate.sigmoid() * up, torch.ones(()))
            return weights[1][expert] @ inner * scales[2][expert]
        if biases[0] is not None:
            both = both + rows_in_order(biases[0][expert])
        down = weights[1][expert] @ in_mxfp8(joined(both, *(at(item, expert) for item in controls)))
        return down if biases[1] is None else down + rows_in_order(biases[1][expert])

    summed(given["topk_ids"], x, given["top_k"], experts, output, gives)


def trtllm_mxfp8(given) -> None:
    """MXFP8 weights by MXFP8 tokens: the arguments of the entry point by name."""
    from tests.backends.flashinfer_trtllm_fake import check_sizes, joined, rows_in_order, summed

    experts, output = given["num_experts"], given["output"]
    assert (given["use_shuffled_weight"], given["weight_layout"], given["routing_bias"]) == (True, 0, None)
    assert given["hidden_states"].dtype is E4M3
    x = tokens_in_floats(given["hidden_states"], given["hidden_states_scale"])
    names = ("num_experts", "top_k", "intermediate_size", "n_group", "topk_group", "local_expert_offset")
    sizes = (*(given[name] for name in names), given["local_num_experts"], given["routed_scaling_factor"])
    check_sizes(x, *sizes, given["routing_method_type"], output)
    assert output.shape == x.shape
    weights = []
    for side in (1, 2):
        codes, tiles = given[f"gemm{side}_weights"], given[f"gemm{side}_weights_scale"]
        assert codes.dtype is E4M3
        assert given["hidden_states_scale"].dtype is tiles.dtype is torch.uint8
        assert codes.is_contiguous()
        assert tiles.is_contiguous()
        matrices = []
        for of, scale in zip(codes, tiles, strict=True):
            factors = power(at_their_places(scale, len(of), of.shape[1] // 32)).repeat_interleave(32, 1)
            matrices.append(rows_in_order(of.float() * factors))
        weights.append(matrices)

    def gives(expert: int, row: Tensor) -> Tensor:
        return weights[1][expert] @ in_mxfp8(joined(weights[0][expert] @ row))

    summed(given["topk_ids"], x, given["top_k"], experts, output, gives)


def cutlass(given) -> None:
    """The arguments of the function by name; gate, up and what joins them are rounded to the dtype of the result."""
    codes, ids, output, dtype = (given[name] for name in ("input", "token_selected_experts", "output", "output_dtype"))
    assert not given["swizzled_input_sf"], "row by row"
    x = tokens_in_floats(codes, given["input_sf"])
    nvfp4 = codes.dtype is torch.uint8
    assert given["use_mxfp8_act_scaling"] is not nvfp4
    group = 16 if nvfp4 else 32
    if nvfp4:
        _, tiles1, alpha1, inverse, tiles2, alpha2 = given["quant_scales"]
        assert inverse.ndim == 0
    else:
        tiles1, alpha1, tiles2, alpha2 = given["quant_scales"]
    experts = len(alpha1)
    weights = []
    for codes_of, tiles in ((given["fc1_expert_weights"], tiles1), (given["fc2_expert_weights"], tiles2)):
        assert codes_of.dtype is torch.int64
        assert tiles.dtype is torch.int32
        assert codes_of.is_contiguous()
        assert tiles.is_contiguous()
        assert codes_of.shape[1] % 128 == 16 * codes_of.shape[2] % 128 == 0
        assert tiles.shape == (experts, codes_of.shape[1], 16 * codes_of.shape[2] // group // 4)
        pairs = zip(codes_of.view(torch.uint8), tiles.view(torch.uint8), strict=True)
        weights.append([weight_in_floats(*pair, group) for pair in pairs])
    for alpha in (alpha1, alpha2):
        assert alpha.dtype is torch.float32
        assert alpha.is_contiguous()
        assert alpha.shape == (experts,)
    biases = [given[f"fc{side}_expert_biases"] for side in (1, 2)]
    assert all(bias is None or (bias.dtype is dtype and bias.is_contiguous()) for bias in biases)
    controls = [given[f"swiglu_{name}"] for name in ("alpha", "beta", "limit")]
    result = torch.zeros(output.shape)
    for token, chosen in enumerate(ids.tolist()):
        for expert in sorted(set(chosen)):
            if not 0 <= expert < experts:
                continue
            factor = given["token_final_scales"][token, chosen.index(expert)]
            both = (weights[0][expert] @ x[token] * alpha1[expert]).to(dtype).float()
            up, gate = (both if biases[0] is None else both + biases[0][expert].float()).chunk(2)
            steep, more, limit = (at(item, expert) for item in controls)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + more
            inner = (gate * (gate * (1.0 if steep is None else steep)).sigmoid() * up).to(dtype)
            inner = in_nvfp4(inner, inverse) if nvfp4 else in_mxfp8(inner)
            down = (weights[1][expert] @ inner * alpha2[expert]).to(dtype).float()
            result[token] += factor * (down if biases[1] is None else down + biases[1][expert].float()).to(dtype)
    output.copy_(result)
