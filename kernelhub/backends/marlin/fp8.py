"""`fp8_gemm` by Marlin, of weights that were packed for it, beside activations that are not quantised.

A code's bits are put into the activations' dtype as they are, which gives it times 2^-8 (float16) or 2^-120
(bfloat16); so scales, which are of that dtype, are packed times 2^8 or 2^120. One scale for a row of b multiplies
float32 sums. Scales of blocks multiply the codes in that dtype, which rounds nothing if they are powers of two. These
facts were read in vLLM's sources (`dequant.h`, `marlin_template.h`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kernelhub.backends.marlin.kernels import SCHEMA, VLLM
from kernelhub.backends.marlin.locks import Locks
from kernelhub.backends.marlin.order import (
    ordered_bytes,
    ordered_columns,
    ordered_scales,
    padded_rows,
    plain_bytes,
    plain_columns,
    plain_scales,
)
from kernelhub.backends.marlin.scales import Unfit
from kernelhub.backends.shared.operands import is_row_major, row_major
from kernelhub.backends.shared.operators import operator
from kernelhub.errors import InvalidArgument
from kernelhub.ops.formats import E4M3, from_e8m0
from kernelhub.ops.gemm.fp8.adapter import Fp8GemmAdapter, WeightOnlyAdapter
from kernelhub.ops.gemm.fp8.problem import BLOCK, Fp8GemmProblem
from kernelhub.ops.packed import PackedWeight, PackingAdapter, Tensors

# Of vLLM's scalar types (vllm/scalar_type.py) e4m3fn: bits of exponent and of mantissa, signed, finite only, one NaN.
E4M3FN = 4 | 3 << 8 | 1 << 16 | 1 << 49 | 2 << 50
_BLOCK = 128
EXPONENT = {torch.float16: 8, torch.bfloat16: 120}
# Powers of two of blocks whose products with every code the dtype holds exactly.
BLOCK_RANGE = {torch.float16: (-15, 7), torch.bfloat16: (-100, 7)}


class MarlinFp8(Fp8GemmAdapter, WeightOnlyAdapter, PackingAdapter):
    """Rows of b are filled up to whole tiles with zeros when it is packed; the result is cut off by a copy."""

    def __init__(self, problem: Fp8GemmProblem) -> None:
        super().__init__(problem)
        self._multiply = operator(VLLM, "marlin_gemm", SCHEMA, problem.device.capability)
        self._locks = Locks()
        self._rows_of_b = padded_rows(problem.n, problem.k)
        self._dtype = getattr(torch, str(problem.weight_only))

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        raise TypeError("Marlin's kernels of float8 weights multiply activations that are not quantised")

    def launch_weights(self, a: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        m, n = out.shape
        direct = n == self._rows_of_b and is_row_major(out)
        made = row_major(out) if direct else out.new_empty((m, self._rows_of_b))
        self._multiply(
            row_major(a),
            made,
            b.view(torch.int32),
            None,  # bias, which it would add after rounding
            b_scale,
            None,
            None,
            None,
            self._locks.on(out.device),
            E4M3FN,
            m,
            self._rows_of_b,
            self.problem.k,
            False,  # no atomic sums, whose order is not fixed
            True,  # partial sums in float32
            False,
        )
        if not direct:
            out.copy_(made[:, :n])

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """A result with rows of b filled up, activations without gaps, and partial sums, of as many blocks as run."""
        return num_tokens * (2 * self._rows_of_b + 2 * self.problem.k) + 4 * 64 * 256 * self.problem.device.num_sms

    def pack(self, *weight: Tensor | None) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        """Codes and scales in Marlin's order, after a check that the dtype of the activations represents the scales."""
        codes, scale = weight
        assert codes is not None
        assert scale is not None
        n = codes.shape[0]
        blocks, held = self._held(scale)
        more = self._rows_of_b - n
        every = _BLOCK if self.problem.scaling == BLOCK else 1
        raw = torch.nn.functional.pad(codes.view(torch.uint8).contiguous(), (0, 0, 0, more))
        if blocks:
            rows = torch.nn.functional.pad(held.repeat_interleave(_BLOCK, 0)[:n], (0, 0, 0, more))
            ordered = ordered_scales(rows)
        else:
            each = held.repeat_interleave(_BLOCK, 0)[:n] if self.problem.scaling == BLOCK else held
            ordered = ordered_columns(torch.nn.functional.pad(each.reshape(-1).expand(n), (0, more)))
        tensors: dict[str, Tensor | None] = {"codes": ordered_bytes(raw), "scale": ordered.contiguous()}
        return tensors, functools.partial(unpack, every=every, dtype=scale.dtype, shape=tuple(scale.shape))

    def check_holds(self, *weight: Tensor | None) -> None:
        """Whether the dtype of the activations holds the scales."""
        _, scale = weight
        assert scale is not None
        self._held(scale)

    def _held(self, scale: Tensor) -> tuple[bool, Tensor]:
        """Whether scales are of blocks of a row, and the scales as Marlin multiplies by them."""
        blocks = self.problem.scaling == BLOCK and self.problem.k > _BLOCK  # a single one is that of the row
        factors = scale if scale.dtype is torch.float32 else from_e8m0(scale)
        try:
            return blocks, held_scales(factors, self._dtype, blocks)
        except Unfit as unfit:
            fix = "prepare a plan with another kernel, such as backend='triton', which supports every weight"
            raise InvalidArgument("fp8_gemm", "b_scale", str(unfit), fix) from unfit


def held_scales(factors: Tensor, dtype: torch.dtype, blocks: bool) -> Tensor:
    """Scales as Marlin multiplies by them.

    Raises:
        Unfit: `dtype` does not hold one exactly, or not its products with the codes of a block.
    """
    exponent = EXPONENT[dtype]
    made = (factors.double() * 2.0**exponent).to(dtype)
    wrong = (made.double() * 2.0**-exponent != factors.double()) | ~made.isfinite()
    name = str(dtype)[6:]
    if bool(wrong.any()):
        raise Unfit(
            f"holds {int(wrong.sum())} scales that {name} cannot represent, but Marlin's have the activations' dtype"
        )
    if blocks:
        low, high = BLOCK_RANGE[dtype]
        mantissa, power = torch.frexp(factors.double().abs())
        odd = (factors != 0) & ((mantissa != 0.5) | (power - 1 < low) | (power - 1 > high))
        if bool(odd.any()):
            raise Unfit(
                f"holds {int(odd.sum())} scales that are not powers of two from 2^{low} to 2^{high}, and Marlin "
                f"multiplies codes by scales of blocks in {name}, which would be rounded"
            )
    return made


def unpack(packed: PackedWeight, *, every: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensors:
    """The inverse of `pack`: codes and scale."""
    codes, scale = packed.tensors["codes"], packed.tensors["scale"]
    assert codes is not None
    assert scale is not None
    n = packed.shape[0]
    raw = plain_bytes(codes)[:n].contiguous().view(E4M3)
    rows = (plain_scales(scale) if scale.shape[0] > 1 else plain_columns(scale))[:n:every]
    factors = (rows.double() * 2.0 ** -EXPONENT[scale.dtype]).float()
    if dtype is not torch.float32:
        exponents = (factors.view(torch.int32) >> 23).to(torch.uint8)
        return raw, exponents.view(dtype).reshape(shape)
    count = torch.Size(shape).numel()
    return raw, factors.reshape(-1)[:count].reshape(shape).contiguous()
