"""From a call of `concat_mla_k` to FlashInfer's kernel."""

from __future__ import annotations

import torch
from flashinfer.concat_ops import concat_mla_k
from torch import Tensor

from kernelhub.backends.shared.operands import aligned, on_device_of
from kernelhub.ops.mla.concat.adapter import ConcatAdapter
from kernelhub.ops.mla.concat.problem import ConcatProblem


class Concat(ConcatAdapter):
    """Both parts in one launch. A part that `out` already contains is read, and written unchanged."""

    def __init__(self, problem: ConcatProblem) -> None:
        super().__init__(problem)
        if problem.device.type == "cuda":  # one token, to load or compile the module
            whole = problem.nope_dim + problem.rope_dim
            k = torch.zeros(1, problem.num_heads, whole, dtype=getattr(torch, problem.dtype), device="cuda")
            self.launch(None, k[:, 0, problem.nope_dim :].contiguous(), k)

    def launch(self, k_nope: Tensor | None, k_rope: Tensor, out: Tensor) -> None:
        width = self.problem.nope_dim
        made = out if aligned_already(out) else out.new_empty(out.shape)
        nope = out[..., :width] if k_nope is None else k_nope
        with on_device_of(out):
            concat_mla_k(made, aligned(nope), aligned(k_rope).unsqueeze(1))
        if made is not out:
            out.copy_(made)


def aligned_already(tensor: Tensor) -> bool:
    """Rows are contiguous and begin at multiples of 16 bytes."""
    size = tensor.element_size()
    wrong = tensor.data_ptr() | tensor.stride(0) * size | tensor.stride(1) * size
    return tensor.stride(2) == 1 and not wrong & 15
