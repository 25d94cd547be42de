"""FlashInfer's dequantiser of torch on a CPU, with its checks and its losses."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from tests.backends.flashinfer_products_fake import E4M3

LARGEST_LAUNCH = (1 << 31) - 1
LAUNCHES: list[tuple[int, ...]] = []


def nvfp4_kv_dequant(fp4_data: Tensor, block_scales: Tensor, global_scale: Tensor, output: Tensor) -> None:
    for tensor in (fp4_data, block_scales, output):
        assert tensor.ndim == 2
        assert tensor.is_contiguous(), "CHECK_INPUT"
    assert fp4_data.dtype is torch.uint8
    assert output.data_ptr() % 4 == fp4_data.data_ptr() % 2 == 0, "pairs are stored, and pairs of pairs loaded"
    assert output.dtype in (torch.float16, torch.bfloat16)
    rows, k = output.shape
    assert fp4_data.shape == (rows, k // 2)
    assert block_scales.shape == (rows, k // 16)
    assert k // 16 + 4 <= 48 << 10, "dynamic shared memory; a launch with more does not run, and says nothing"
    assert rows * k <= LARGEST_LAUNCH, "int"
    LAUNCHES.append(tuple(output.shape))
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = torch.stack([fp4_data & 15, fp4_data >> 4], 2).flatten(1).long()
    values = table[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)
    scales = block_scales.view(E4M3).float().repeat_interleave(16, 1)
    output.copy_(flushed(flushed(values * scales) * flushed(global_scale)))


def flushed(values: Tensor) -> Tensor:
    """With ``-use_fast_math`` what is below 2^-126 is 0."""
    return torch.where(values.abs() < 2.0**-126, values * 0, values)


def get_fp4_kv_dequantization_module() -> SimpleNamespace:
    return SimpleNamespace(nvfp4_kv_dequant=nvfp4_kv_dequant)
