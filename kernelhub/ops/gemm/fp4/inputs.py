"""Products with float4 weights, with the shapes of real models."""

from __future__ import annotations

from typing import Any

import torch

from kernelhub.ops.gemm.fp4.problem import FP8, MXFP4, MXFP8, NVFP4
from kernelhub.ops.quant.inputs import activations
from kernelhub.ops.quant.reference import (
    quantize_fp8_reference,
    quantize_mxfp4_reference,
    quantize_mxfp8_reference,
    quantize_nvfp4_reference,
)


def fp4_gemm_inputs(
    *,
    tokens: int = 16,
    n: int = 8192,
    k: int = 8192,
    a_format: str = "bfloat16",
    b_format: str = NVFP4,
    per_row: bool = True,
    bias: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `fp4_gemm`, quantised from normal numbers whose groups differ in size by up to 16.

    Args:
        tokens: rows of a.
        n, k: shape of b before packing two a byte.
        a_format, b_format: as of the op's problem.
        per_row: of fp8, whether each row has a scale.
        bias: add one.
        out_dtype: of the result.
        device: where the tensors are.
        seed: equal seeds give equal tensors on every device.
    """
    random = torch.Generator(device="cpu").manual_seed(seed)
    sizes = torch.exp2(torch.randint(0, 5, (n, -(-k // 16)), generator=random, device="cpu").float()).repeat_interleave(
        16, 1
    )
    made: dict[str, Any] = {}
    _put(
        made,
        "b",
        torch.randn(n, k, generator=random, dtype=torch.float32, device="cpu") * sizes[:, :k] * k**-0.5,
        b_format,
        False,
    )
    x = activations(tokens, k, dtype=torch.float32, seed=seed + 1)
    x *= torch.exp2(torch.randint(-2, 3, (tokens, 1), generator=random, device="cpu").float())
    _put(made, "a", x, a_format, per_row)
    if bias:
        made["bias"] = torch.randn(n, generator=random, dtype=torch.float32, device="cpu").to(out_dtype)
    return {**{name: tensor.to(device) for name, tensor in made.items()}, "out_dtype": out_dtype}


def _put(made: dict[str, Any], name: str, x: torch.Tensor, form: str, per_row: bool) -> None:
    """An operand with its scales."""
    if form == NVFP4:
        made[name], made[f"{name}_scale"], made[f"{name}_global_scale"] = quantize_nvfp4_reference(x)
    elif form == MXFP4:
        made[name], made[f"{name}_scale"] = quantize_mxfp4_reference(x)
    elif form == MXFP8:
        made[name], made[f"{name}_scale"] = quantize_mxfp8_reference(x)
    elif form == FP8:
        made[name], made[f"{name}_scale"] = quantize_fp8_reference(x, "token" if per_row else "tensor")
    else:
        made[name] = x.to(getattr(torch, form))
