"""Quantisation a block of rows at a time, so that intermediate results stay in the cache of a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernelhub.ops.formats import E8M0, to_e8m0_up
from kernelhub.ops.quant.adapter import DequantizeAdapter, QuantizeAdapter
from kernelhub.ops.quant.problem import BLOCK, BLOCK_SIZE, GROUP, MX_GROUP, NVFP4_GROUP, TENSOR
from kernelhub.ops.quant.reference import (
    clean,
    dequantize_rows,
    e4m3_codes,
    fp8_scale,
    global_scale_of,
    quantize_fp8_rows,
    quantize_mx_rows,
    quantize_nvfp4_rows,
)

# Of a block, 1 MB in float32.
_ELEMENTS = 1 << 18


def _blocks(x: Tensor, multiple: int = 1) -> Iterator[slice]:
    """Slices of the rows of [M, K] or [B, M, K]; on a GPU one."""
    rows = every = x.shape[-2]
    if x.device.type == "cpu":
        rows = max(1, _ELEMENTS // (x.numel() // every * multiple)) * multiple
    return (slice(start, start + rows) for start in range(0, every, rows))


def _amax(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor, of one element."""
    return torch.stack([clean(x[..., rows, :])[0].abs().amax() for rows in _blocks(x)]).amax().view(1)


class QuantizeFp8(QuantizeAdapter):
    """`quantize_fp8` anywhere."""

    def launch(self, x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> None:
        problem = self.problem
        if problem.granularity == TENSOR and not problem.static:
            _write(scale, fp8_scale(_amax(x), problem.ue8m0).view(1, 1))
        given = problem.static or problem.granularity == TENSOR
        step = BLOCK_SIZE if problem.granularity == BLOCK else 1
        for rows in _blocks(x, step):
            if given:
                own = scale if scale.shape[-2] == 1 else scale[..., rows, :]
                wide, nan = clean(x[..., rows, :])
                codes[..., rows, :] = e4m3_codes(wide, nan, own.float())
                continue
            part, made = quantize_fp8_rows(x[..., rows, :], problem.granularity, problem.group_size, problem.ue8m0)
            codes[..., rows, :] = part
            _write(scale[..., rows.start // step : -(-rows.stop // step), :], made)


def _write(scale: Tensor, made: Tensor) -> None:
    """float32 scales where they belong; torch's own conversion to float8_e8m0fnu is exact for 2^-126 and more."""
    scale.copy_(to_e8m0_up(made) if scale.dtype == E8M0 else made)


class QuantizeNvfp4(QuantizeAdapter):
    """`quantize_nvfp4` anywhere."""

    def launch(self, x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> None:
        assert global_scale is not None
        if not self.problem.static:
            global_scale.copy_(global_scale_of(_amax(x)).view(global_scale.shape))
        for rows in _blocks(x):
            codes[..., rows, :], scale[..., rows, :] = quantize_nvfp4_rows(x[..., rows, :], global_scale.reshape(()))


class QuantizeMxfp4(QuantizeAdapter):
    """`quantize_mxfp4` anywhere."""

    fp4 = True

    def launch(self, x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> None:
        for rows in _blocks(x):
            codes[..., rows, :], scale[..., rows, :] = quantize_mx_rows(
                x[..., rows, :], self.fp4, self.problem.round_up
            )


class QuantizeMxfp8(QuantizeMxfp4):
    """`quantize_mxfp8` anywhere."""

    fp4 = False


class Dequantize(DequantizeAdapter):
    """`dequantize_fp8`, `dequantize_nvfp4`, `dequantize_mxfp4` and `dequantize_mxfp8` anywhere."""

    def launch(self, codes: Tensor, scale: Tensor, global_scale: Tensor | None, out: Tensor) -> None:
        area = {BLOCK: (BLOCK_SIZE, BLOCK_SIZE), GROUP: (1, self.columns)}.get(self.granularity, (1, 0))
        factor = None if global_scale is None else global_scale.reshape(())
        for rows in _blocks(out, area[0]):
            own = scale if scale.shape[-2] == 1 else scale[..., rows.start // area[0] : -(-rows.stop // area[0]), :]
            out[..., rows, :] = dequantize_rows(codes[..., rows, :], own, factor, *area, out.dtype)

    @property
    def granularity(self) -> str:
        """The values that share a scale."""
        return GROUP

    @property
    def columns(self) -> int:
        """Elements of a group."""
        return MX_GROUP


class DequantizeFp8(Dequantize):
    """`dequantize_fp8` anywhere."""

    @property
    def granularity(self) -> str:
        granularity: str = self.problem.granularity
        return granularity

    @property
    def columns(self) -> int:
        size: int = self.problem.group_size
        return size


class DequantizeNvfp4(Dequantize):
    """`dequantize_nvfp4` anywhere."""

    @property
    def columns(self) -> int:
        return NVFP4_GROUP
