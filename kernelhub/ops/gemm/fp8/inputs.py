"""Float8 matrices with the shapes of real models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.formats import E4M3, E4M3_MAX, E5M2, from_e8m0, to_e4m3, to_e8m0_up
from kernelhub.ops.gemm.fp8.problem import BLOCK, GROUP, MX, ROW, TENSOR
from kernelhub.ops.gemm.fp8.scaling import blocks


def fp8_gemm_inputs(
    *,
    tokens: int = 16,
    n: int = 4096,
    k: int = 4096,
    scaling: str = BLOCK,
    per_row: tuple[bool, bool] = (True, True),
    e8m0: tuple[bool, bool] = (False, False),
    bias: bool = False,
    weight_only: torch.dtype | None = None,
    e5m2: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `fp8_gemm`, quantised as a checkpoint and an engine quantise them.

    Rows of a and of b differ in size by a factor of up to 8, so that a scale of another row shows.

    Args:
        tokens: rows of a.
        n, k: shape of b.
        scaling: tensor, row, block, row_block or mx.
        per_row: of row, whether a and b have a scale per row, else one per tensor.
        e8m0: of block and row_block, whether scales of a and b are powers of two in one byte.
        bias: add one.
        weight_only: dtype of activations that are not quantised.
        e5m2: activations are float8_e5m2.
        out_dtype: of the result.
        device: where the tensors are.
        seed: equal seeds give equal tensors on every device.
    """
    random = torch.Generator(device="cpu").manual_seed(seed)
    a = _matrix(tokens, k, random, 1.0)
    b = _matrix(n, k, random, k**-0.5)
    made: dict[str, Any] = {}
    for name, matrix, own, small in (("a", a, per_row[0], e8m0[0]), ("b", b, per_row[1], e8m0[1])):
        if scaling == TENSOR or (scaling == ROW and not own):
            codes, scale = _quantised(matrix, matrix.shape[0] or 1, k, False)
            scale = (
                scale.reshape(-1)[:1].reshape(())
                if scale.numel()
                else torch.ones((), dtype=torch.float32, device="cpu")
            )
        elif scaling == ROW:
            codes, scale = _quantised(matrix, 1, k, False)
        else:
            rows = 128 if name == "b" and scaling == BLOCK else 1
            codes, scale = _quantised(matrix, rows, GROUP[scaling], small or scaling == MX)
        made[name], made[f"{name}_scale"] = codes.to(device), scale.to(device)
    if e5m2:
        made["a"] = made["a"].float().to(E5M2)
    if weight_only is not None:
        made |= {"a": a.to(weight_only).to(device), "a_scale": None}
    if bias:
        made["bias"] = torch.randn(n, generator=random, dtype=torch.float32, device="cpu").to(out_dtype).to(device)
    return {**made, "out_dtype": out_dtype}


def _matrix(rows: int, columns: int, random: torch.Generator, size: float) -> Tensor:
    """Normal numbers, each 32nd of a row of a size of its own."""
    values = torch.randn(rows, columns, generator=random, dtype=torch.float32, device="cpu") * size
    sizes = torch.randint(0, 4, (rows, blocks(columns, 32)), generator=random, device="cpu")
    return values * torch.exp2(sizes.float()).repeat_interleave(32, 1)[:, :columns]


def _quantised(matrix: Tensor, rows: int, columns: int, e8m0: bool) -> tuple[Tensor, Tensor]:
    """Codes, and a scale for each block of rows x columns."""
    m, k = matrix.shape
    high, wide = blocks(m, rows), blocks(k, columns)
    padded = matrix.new_zeros(high * rows, wide * columns)
    padded[:m, :k] = matrix
    tiles = padded.view(high, rows, wide, columns)
    scale = (tiles.abs().amax((1, 3)) / E4M3_MAX).clamp(min=1e-12)
    stored = to_e8m0_up(scale) if e8m0 else scale
    values = from_e8m0(stored) if e8m0 else scale
    codes = to_e4m3(tiles / values[:, None, :, None]).view(torch.uint8).view(high * rows, wide * columns)[:m, :k]
    return codes.contiguous().view(E4M3), stored
