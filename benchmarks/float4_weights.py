"""Float4 weights of vLLM's linear layers, drawn on the machine: a checkpoint in neither NVFP4 nor MXFP4 is needed.

vLLM makes a model whose linear layers have compressed-tensors' parameters (`CONFIGS` goes into the model's config).
`fill` draws the weight that each layer would have without quantisation, and stores it in those parameters as a
checkpoint does, before vLLM packs them for its kernel. So a run with a kernel and one with another have the same codes
and scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LARGEST, LARGEST_SCALE = 6.0, 448.0  # of float4 e2m1, of float8 e4m3
MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between the values of float4 e2m1
GROUP = {"nvfp4": 16, "mxfp4": 32}
OF_ATTENTION = ("k_scale", "v_scale", "q_scale", "prob_scale")


def _config(b_format: str) -> dict[str, Any]:
    numbers = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": GROUP[b_format]}
    numbers["strategy"] = "tensor_group" if b_format == "nvfp4" else "group"
    group = {"targets": ["Linear"], "weights": {**numbers, "dynamic": False}, "output_activations": None}
    # vLLM selects its kernel of NVFP4 weights by name, and asks no list, if activations are not quantised.
    group["input_activations"] = {**numbers, "dynamic": "local"} if b_format == "nvfp4" else None
    common = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {**common, "format": f"{b_format}-pack-quantized", "config_groups": {"group_0": group}}


CONFIGS = {b_format: _config(b_format) for b_format in GROUP}


@torch.inference_mode()
def fill(model: torch.nn.Module, draw: Callable[[str, Tensor], None]) -> None:
    """Fill a model's parameters, in place.

    Args:
        model: of vLLM, before its weights are packed.
        draw: fills a tensor for the parameter of a name; a layer in float4 asks it for the weight in bfloat16.
    """
    parameters = dict(model.named_parameters())
    for name, weight in parameters.items():
        layer, _, kind = name.rpartition(".")
        if kind in OF_ATTENTION:
            weight.data.fill_(-1.0)  # vLLM's mark of one that the checkpoint lacks
        elif kind.endswith("_zero_point"):
            weight.data.zero_()
        elif f"{layer}.weight_packed" not in parameters:
            draw(name, weight.data)
        elif kind == "weight_packed":
            full = torch.empty(weight.shape[0], 2 * weight.shape[1], dtype=torch.bfloat16, device=weight.device)
            draw(f"{layer}.weight", full)
            factor = parameters.get(f"{layer}.weight_global_scale")
            codes, scale, whole = quantised(full, "mxfp4" if factor is None else "nvfp4")
            weight.data.copy_(codes)
            parameters[f"{layer}.weight_scale"].data.copy_(scale)
            if factor is not None:
                factor.data.fill_(whole)
        elif kind == "input_global_scale":
            weight.data.fill_(1.0)


def quantised(weight: Tensor, b_format: str) -> tuple[Tensor, Tensor, float]:
    """Codes ``[N, K / 2]``, scales ``[N, K / group]`` and what the scales of NVFP4 were multiplied with."""
    parts = weight.float().unflatten(-1, (-1, GROUP[b_format]))
    largest = parts.abs().amax(-1)
    if b_format == "nvfp4":
        whole = LARGEST * LARGEST_SCALE / max(float(largest.max()), 1e-30)
        scale = (largest / LARGEST * whole).to(torch.float8_e4m3fn)
        factor = scale.float() / whole
    else:
        whole = 1.0
        exponent = torch.ceil(torch.log2(largest.clamp(min=2.0**-120) / LARGEST))
        scale, factor = (exponent + 127).to(torch.uint8), torch.exp2(exponent)
    values = parts / torch.where(factor > 0, factor, 1.0)[..., None]
    codes = torch.bucketize(values.abs(), torch.tensor(MIDDLES, device=weight.device)).to(torch.uint8)
    codes = (codes | torch.signbit(values).to(torch.uint8) << 3).flatten(-2)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scale, whole
