"""The formats to which activations are rounded before the products.

=================  ==================================================================================================
float8_e4m3fn      e4m3 for x and for the result of the activation, by rows, or by 1 x 128 for weights in blocks. The
                   result is first rounded to the dtype of x. A scale is the largest magnitude, at least 1e-10,
                   over 448.
fp8_block          the same by 1 x 128, with three differences: gate and up may first be rounded to the dtype of x;
                   scales may be smaller where 1e-10 is the largest magnitude; division may use reciprocals, which
                   give the neighbouring code where two are equally near.
fp8_block_gate_up  gate and up are each rounded to e4m3 by 1 x 128 before the activation, and its result again after it.
mxfp8              e4m3 with a power of two for 1 x 32: the largest magnitude over 448, rounded up.
nvfp4              e2m1 with an e4m3 scale for 1 x 16: the largest magnitude over 6 and over a second, static scale,
                   that of x (`a1_scale`) or of the result of the activation (`a2_scale`).
=================  ==================================================================================================

For mxfp8 and nvfp4, either gate, up and the result of the activation are all rounded to the dtype of x first, or none.

Source: DeepSeek-V3 (2024), section 3.3; OCP Microscaling Formats 1.0; the kernels of TensorRT-LLM and CUTLASS as
FlashInfer 0.6.18 has them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernelhub.ops.formats import E2M1_MAX, E4M3_MAX, from_e2m1, from_e8m0, to_e2m1, to_e4m3, to_e8m0_up
from kernelhub.ops.moe.experts.problem import FLOATS, FP8_BLOCK_GATE_UP, MXFP8, NVFP4
from kernelhub.ops.moe.experts.weights import BLOCK

SMALLEST_AMAX = 1e-10
LEAST_AMAX = 2.0**-126 * E4M3_MAX  # of scales that are normal float32 numbers
MX_GROUP, NVFP4_GROUP = 32, 16
LEAST_NVFP4_SCALE = 2.0**-9  # the least e4m3 above 0
# A normal distribution in four numbers: deviations, and the share of it around them.
MOVES = ((-2.0, 0.15), (-0.5, 0.35), (0.5, 0.35), (2.0, 0.15))


class Activations(NamedTuple):
    """The rounding of activations.

    Attributes:
        form: a dtype or a format, named as the facet `activation_dtype`.
        by_block: float8 has a scale for each 1 x 128, not for each row.
    """

    form: str
    by_block: bool

    @property
    def wide(self) -> bool:
        """Whether they stay what they are."""
        return self.form in FLOATS

    def rounded(self, rows: Tensor, scale: Tensor | None, dtype: torch.dtype, least: float = SMALLEST_AMAX) -> Tensor:
        """Rows [R, K] as the values, in `dtype`, that their codes and scales mean.

        Args:
            rows: any floats.
            scale: of one element, of float8 with a known scale and of nvfp4; else None.
            dtype: of the result.
            least: magnitude that the largest of float8 counts as, at least.
        """
        if self.wide:
            return rows.to(dtype)
        groups = self._groups(rows.float(), scale)
        factor = self._scale(groups.abs().amax(2, keepdim=True), scale, least)
        values = (self._code(groups / factor).to(dtype) * factor.to(dtype)).flatten(1)
        return values[:, : rows.shape[1]]

    def variance(
        self, rows: Tensor, std: Tensor, reach: Tensor, scale: Tensor | None, least: float = SMALLEST_AMAX
    ) -> Tensor:
        """The mean square of how far `rounded` values move if rows, float64, move by numbers of these deviations.

        The scale of a group is that of its largest magnitude, or of one that moved by its reach, up or down, whichever
        moves values most.
        """
        if self.wide:
            return std.square()
        groups, moves, farthest = (self._groups(one, scale) for one in (rows, std, reach))
        sizes = groups.abs()
        usual = self._scale(sizes.float().amax(2, keepdim=True), scale, least)
        before = self._code((groups / usual.double()).float()).double() * usual.double()
        largest = torch.zeros_like(groups)
        for way in (-1.0, 0.0, 1.0):
            factor = self._scale((sizes + way * farthest).float().amax(2, keepdim=True), scale, least).double()
            moved = torch.zeros_like(groups)
            for far, chance in MOVES:
                after = self._code(((groups + far * moves) / factor).float()).double() * factor
                moved += chance * (after - before).square()
            largest = torch.maximum(largest, moved)
        return largest.flatten(1)[:, : rows.shape[1]]

    def _groups(self, rows: Tensor, scale: Tensor | None) -> Tensor:
        """[R, groups, width], the last filled up with zeros."""
        if self.form == MXFP8:
            width = MX_GROUP
        elif self.form == NVFP4:
            width = NVFP4_GROUP
        else:
            width = BLOCK if self.by_block and scale is None else rows.shape[1]
        groups: Tensor = pad(rows, (0, -rows.shape[1] % width)).unflatten(1, (-1, width))
        return groups

    def _scale(self, amax: Tensor, scale: Tensor | None, least: float) -> Tensor:
        """float32 scales of groups of these largest magnitudes."""
        if self.form == MXFP8:
            return from_e8m0(to_e8m0_up(amax / torch.full_like(amax, E4M3_MAX)))
        if self.form == NVFP4:
            assert scale is not None
            second = scale.float().reshape(1, 1, 1)
            wanted = amax / torch.full_like(amax, E2M1_MAX) / second
            kept = to_e4m3(wanted.clamp(min=LEAST_NVFP4_SCALE)).float() * second
            return torch.where(amax.isnan(), amax, kept)
        if scale is not None:
            return scale.float().reshape(1, 1, 1)
        return amax.clamp(min=least) / torch.full_like(amax, E4M3_MAX)

    def _code(self, quotients: Tensor) -> Tensor:
        """The values of the nearest codes, without scales; NaN stays."""
        if self.form != NVFP4:
            return to_e4m3(quotients)
        return torch.where(quotients.isnan(), quotients, from_e2m1(to_e2m1(quotients)))


def inner_least(form: str) -> float:
    """Magnitude that the largest of gate, of up and of what joins them counts as, at least."""
    return LEAST_AMAX if form == FP8_BLOCK_GATE_UP else SMALLEST_AMAX
