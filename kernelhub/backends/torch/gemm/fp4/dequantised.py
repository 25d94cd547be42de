"""`fp4_gemm` by dequantising rows of the weight, a block that stays in the cache of a CPU, and multiplying in float32.

Global scales and scales of rows of a are put in after the product, which is exact in everything but its sums. Of what
e8m0 scales, up to 2^127, a power of two is left for then too, or the largest values would be infinite, and times 0 NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.torch.gemm.two_scales import multiply_by_both
from kernelhub.ops.formats import from_e2m1, from_e8m0
from kernelhub.ops.gemm.fp4.adapter import Activations, Fp4GemmAdapter, Weights
from kernelhub.ops.gemm.fp4.problem import FP8, GROUP, MXFP4, MXFP8, NVFP4
from kernelhub.ops.graph_memory import may_keep
from kernelhub.ops.precision import at_own_precision

# Of a block in float32, 4 MB; on a GPU 256 MB.
_ELEMENTS = {"cpu": 1 << 20}
_ELEMENTS_ON_GPU = 1 << 26


# So that 6 or 448 times 2^127 is finite; the least value times it is still a number of float32.
_LEFT = {MXFP4: 2.0**3, MXFP8: 2.0**9}


_PAIRS: dict[torch.device, Tensor] = {}


def _pairs(device: torch.device) -> Tensor:
    """Both values of every byte, float32 [256, 2]."""
    made = _PAIRS.get(device)
    if made is None:
        made = from_e2m1(torch.arange(256, device=device).to(torch.uint8)).view(256, 2)
        if may_keep(made):
            _PAIRS[device] = made
    return made


def _grouped(codes: Tensor, scale: Tensor, form: str) -> Tensor:
    """float32 [rows, K] of codes and the scales of their groups, over what is left."""
    fp4 = form in (NVFP4, MXFP4)
    plain: Tensor = _pairs(codes.device)[codes.int()].flatten(-2) if fp4 else codes.float()
    factor = scale.float() if form == NVFP4 else from_e8m0(scale) / _LEFT[form]
    groups: Tensor = plain.unflatten(-1, (-1, GROUP[form]))
    return groups.mul_(factor.unsqueeze(-1)).flatten(-2)


class Dequantised(Fp4GemmAdapter):
    """`fp4_gemm` anywhere."""

    @at_own_precision
    def launch(self, a: Activations, b: Weights, bias: Tensor | None, out: Tensor) -> None:
        form = self.problem.a_format
        if a.scale is None or form == FP8:
            left = a.codes.float()
        else:
            left = _grouped(a.codes, a.scale, form)
        of_a = a.scale if form == FP8 else None if a.global_scale is None else a.global_scale.reshape(())
        of_b = None if b.global_scale is None else b.global_scale.reshape(())
        left_over = _LEFT.get(form, 1.0) * _LEFT.get(self.problem.b_format, 1.0)
        rows = max(1, _ELEMENTS.get(out.device.type, _ELEMENTS_ON_GPU) // self.problem.k)
        for start in range(0, out.shape[1], rows):
            part = slice(start, start + rows)
            product = left @ _grouped(b.codes[part], b.scale[part], self.problem.b_format).t()
            if of_a is not None and of_b is not None:
                multiply_by_both(product, of_a, of_b)
            elif of_a is not None:
                product *= of_a
            elif of_b is not None:
                product *= of_b
            if left_over != 1.0:
                product *= left_over
            if bias is not None:
                product += bias[part]
            out[:, part] = product
