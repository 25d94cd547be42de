"""Blocks of float8 for DeepGEMM's weights, and its similarity measure, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DEFAULT_BLOCK_SIZE = [128, 128]
_TMA_BYTES = 16
_SMALLEST = 1e-4  # of a block's largest magnitude, so that a block of zeros has a scale
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """The next size whose bytes the tensor memory accelerator supports."""
    step = _TMA_BYTES // element_size
    return -(-x // step) * step


def per_block_cast_to_fp8(
    x: Tensor, block_size: Sequence[int] = DEFAULT_BLOCK_SIZE, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """``x [M, N]`` as e4m3 with a float32 scale for each block, ``[ceil(M / rows), ceil(N / columns)]``.

    Args:
        x: any float dtype.
        block_size: rows and columns of a block; blocks at the edge are narrower.
        use_ue8m0: round scales up to powers of two.

    Example:
        >>> import torch
        >>> codes, scales = per_block_cast_to_fp8(torch.full((130, 256), 448.0))
        >>> codes.shape, scales.tolist()
        (torch.Size([130, 256]), [[1.0, 1.0], [1.0, 1.0]])
    """
    rows, columns = block_size
    m, n = x.shape
    padded = x.new_zeros((-(-m // rows) * rows, -(-n // columns) * columns))
    padded[:m, :n] = x
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns).float()
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp_min(_SMALLEST) / _LARGEST
    if use_ue8m0:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    codes = (blocks * (1.0 / scales)).to(torch.float8_e4m3fn).view(padded.shape)
    return codes[:m, :n].contiguous(), scales.view(blocks.shape[0], blocks.shape[2])


def calc_diff(x: Tensor, y: Tensor) -> Tensor:
    """DeepGEMM's measure over whole tensors: 1 - 2 <x, y> / (<x, x> + <y, y>), 0 if they are equal.

    Example:
        >>> import torch
        >>> calc_diff(torch.ones(3), torch.ones(3)).item()
        0.0
    """
    x, y = x.double(), y.double()
    return 1 - 2 * (x * y).sum() / (x * x + y * y).sum()
