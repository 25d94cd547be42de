"""Batches of float8 matrices with the shapes of real models."""

from __future__ import annotations

from typing import Any

import torch

from kernelhub.ops.formats import E4M3_MAX, E5M2, to_e4m3
from kernelhub.ops.gemm.fp8.batched.problem import BATCH, TENSOR


def bmm_fp8_inputs(
    *,
    batch: int = 128,
    tokens: int = 16,
    n: int = 512,
    k: int = 128,
    a_scaling: str = TENSOR,
    b_scaling: str = TENSOR,
    e5m2: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `bmm_fp8`: by default queries of DeepSeek-V3.2 into the latent space, their heads first.

    a is a view of ``[tokens, batch, k]``, as an engine has it. Matrices differ in size by a factor of up to 8.
    """
    random = torch.Generator(device="cpu").manual_seed(seed)
    a = torch.randn(tokens, batch, k, generator=random, dtype=torch.float32, device="cpu")
    b = torch.randn(batch, n, k, generator=random, dtype=torch.float32, device="cpu") * k**-0.5
    sizes = torch.exp2(torch.randint(0, 4, (2, batch), generator=random, device="cpu").float())
    made: dict[str, Any] = {}
    for name, matrix, scaling in (
        ("a", a.transpose(0, 1) * sizes[0][:, None, None], a_scaling),
        ("b", b * sizes[1][:, None, None], b_scaling),
    ):
        largest = (
            matrix.abs().flatten(1).amax(1) if matrix.numel() else torch.ones(batch, dtype=torch.float32, device="cpu")
        )
        scale = (
            largest / E4M3_MAX
            if scaling == BATCH
            else (largest.max() if batch else torch.ones((), dtype=torch.float32, device="cpu")) / E4M3_MAX
        )
        codes = to_e4m3(matrix / scale.reshape(-1, 1, 1))
        codes = codes.float().to(E5M2) if e5m2 == name else codes
        if name == "a":
            codes = codes.transpose(0, 1).contiguous().to(device).transpose(0, 1)
        made[name], made[f"{name}_scale"] = codes.to(device), scale.to(device)
    return {**made, "out_dtype": out_dtype}
