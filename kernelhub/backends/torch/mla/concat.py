"""The two parts of latent attention's keys, copied into one tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.mla.concat.adapter import ConcatAdapter


class Concat(ConcatAdapter):
    """`concat_mla_k` anywhere."""

    def launch(self, k_nope: Tensor | None, k_rope: Tensor, out: Tensor) -> None:
        width = self.problem.nope_dim
        if out.dtype.itemsize == 1:  # bytes are copied faster than float8, which goes one by one
            out, k_rope = out.view(torch.uint8), k_rope.view(torch.uint8)
            k_nope = None if k_nope is None else k_nope.view(torch.uint8)
        if k_nope is not None:
            out[..., :width] = k_nope
        out[..., width:] = k_rope.unsqueeze(1)
