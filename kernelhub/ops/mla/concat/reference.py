"""`concat_mla_k` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.precision import without_autocast


@without_autocast
def concat_mla_k_reference(k_nope: Tensor, k_rope: Tensor, out: Tensor | None = None) -> Tensor:
    """The op; arguments as of it, the destination ignored."""
    shared = k_rope if k_rope.ndim == 3 else k_rope.unsqueeze(1)
    shared = shared.expand(-1, k_nope.shape[1], -1)
    if k_nope.dtype.itemsize == 1:  # torch concatenates no float8 on some devices
        return torch.cat([k_nope.view(torch.uint8), shared.view(torch.uint8)], 2).view(k_nope.dtype)
    return torch.cat([k_nope, shared], 2)
