"""`fused_moe` of MXFP4 weights by MXFP8 activations (opt-in), by TensorRT-LLM's kernels.

Weights have the layout for bfloat16 tokens. The result of the activation is quantised from float32.
"""

from __future__ import annotations

from torch import Tensor

from kernelhub.backends.flashinfer.moe.codes.tokens import as_mxfp8
from kernelhub.backends.flashinfer.moe.trtllm_mxfp4 import TrtllmMxfp4
from kernelhub.ops.formats import E4M3


class TrtllmMxfp8(TrtllmMxfp4):
    """Tokens are filled up to whole 256 before they are quantised, with zeros, which stay."""

    most_tile = 256

    def workspace_bytes(self, num_tokens: int) -> int:
        """With tokens in float32 and as codes, one after the other."""
        return super().workspace_bytes(num_tokens) + 24 * num_tokens * self._width

    def _given(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        codes, powers = as_mxfp8(x)
        return codes, powers.view(E4M3)  # as which the library takes all scales
