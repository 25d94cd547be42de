"""`fp4_gemm` of NVFP4 by NVFP4, and of MXFP4 by MXFP4.

Scales are read in tiles (`shared.scales`), by TensorRT-LLM's kernels with the rows of the weight in another order.
What that takes is done to the weight by `pack`, or at each call, and to the scales of the activations at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from flashinfer.gemm.gemm_base import mm_fp4
from torch import Tensor

from kernelhub.backends.flashinfer.gemm.operands import shuffled, unshuffled
from kernelhub.backends.shared.operands import is_row_major, on_device_of, row_major
from kernelhub.backends.shared.scales import TILE_GROUPS, TILE_ROWS, tiled, untiled
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.ops.formats import E4M3
from kernelhub.ops.gemm.fp4.adapter import Activations, Fp4GemmAdapter, Weights
from kernelhub.ops.gemm.fp4.problem import GROUP, MXFP4, NVFP4, Fp4GemmProblem
from kernelhub.ops.packed import PackedWeight, PackingAdapter, Tensors

_SMALLEST = 256  # N and K of the product that loads the module


class Fp4Cutlass(Fp4GemmAdapter, PackingAdapter):
    """CUTLASS on Blackwell."""

    runner: ClassVar[str] = "cutlass"
    shuffles: ClassVar[bool] = False

    def __init__(self, problem: Fp4GemmProblem) -> None:
        super().__init__(problem)
        self._packed = problem.weight_layout != CHECKPOINT
        self._nvfp4 = problem.a_format == NVFP4
        self._group = GROUP[NVFP4 if self._nvfp4 else MXFP4]
        if problem.device.type == "cuda":  # loads or compiles the module: it reports now what it lacks
            codes = torch.zeros(_SMALLEST, _SMALLEST // 2, dtype=torch.uint8, device="cuda")
            dtype = E4M3 if self._nvfp4 else torch.uint8
            scale = torch.zeros(_SMALLEST, _SMALLEST // self._group, dtype=dtype, device="cuda")
            one = torch.ones(1, device="cuda", dtype=torch.float32) if self._nvfp4 else None
            out = torch.empty(_SMALLEST, _SMALLEST, dtype=getattr(torch, problem.out_dtype), device="cuda")
            weight = Weights(codes, scale, one)
            if self._packed:
                weight = Weights(*self._arranged(codes, scale), one)
            self.launch(Activations(codes, scale, one), weight, None, out)

    def pack(self, *weight: Tensor | None) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        codes, scale, global_scale = weight
        assert codes is not None
        assert scale is not None
        made, tiles = self._arranged(codes.view(torch.uint8), scale)
        back = unpack_shuffled if self.shuffles else unpack
        return {"codes": made, "scale": tiles, "global_scale": global_scale}, back

    def _arranged(self, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of the weight as the kernel reads them."""
        if not self.shuffles:
            return row_major(codes), tiled(scale)
        return shuffled(codes), tiled(shuffled(scale.view(torch.uint8)))

    def launch(self, a: Activations, b: Weights, bias: Tensor | None, out: Tensor) -> None:
        assert a.scale is not None
        codes, scale = (b.codes, b.scale) if self._packed else self._arranged(b.codes, b.scale)
        alpha = None
        if self._nvfp4:
            assert a.global_scale is not None
            assert b.global_scale is not None
            alpha = a.global_scale.reshape(1) * b.global_scale.reshape(1)
        direct = is_row_major(out)
        made = row_major(out) if direct else out.new_empty(out.shape)
        with on_device_of(out):
            mm_fp4(
                row_major(a.codes),
                row_major(codes).t(),
                tiled(a.scale),
                scale.t(),
                alpha,
                out.dtype,
                made,
                self._group,
                False,
                self.runner,
                self._nvfp4,
            )
        if not direct:
            out.copy_(made)

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """Scales in tiles, twice while they are made; the weight in another order; operands and a result."""
        n, k = self.problem.n, self.problem.k
        groups = k // self._group + TILE_GROUPS
        weight = 0 if self._packed else n * k // 2 + 2 * groups * (n + TILE_ROWS)
        return weight + 2 * groups * (num_tokens + TILE_ROWS) + num_tokens * (k // 2 + 2 * n)


class Fp4Cudnn(Fp4Cutlass):
    """cuDNN: a graph for each number of rows, kept once made."""

    runner = "cudnn"


class Fp4Trtllm(Fp4Cutlass):
    """TensorRT-LLM's binaries, for which the rows of the weight are interleaved."""

    runner = "trtllm"
    shuffles = True


def unpack(packed: PackedWeight) -> Tensors:
    """The inverse of `pack`: codes, scale and global scale."""
    codes, scale = _plain(packed)
    return codes.view(packed.dtype), scale.view(packed.facts["scale_dtype"]), packed.tensors["global_scale"]


def unpack_shuffled(packed: PackedWeight) -> Tensors:
    """The same of a weight whose rows are in another order."""
    codes, scale = map(unshuffled, _plain(packed))
    return codes.view(packed.dtype), scale.view(packed.facts["scale_dtype"]), packed.tensors["global_scale"]


def _plain(packed: PackedWeight) -> tuple[Tensor, Tensor]:
    """Codes and scales as bytes, row by row."""
    codes, scale = packed.tensors["codes"], packed.tensors["scale"]
    assert codes is not None
    assert scale is not None
    group = GROUP[NVFP4 if packed.facts["scale_dtype"] is E4M3 else MXFP4]
    return codes, untiled(scale, packed.shape[0], packed.shape[1] * 2 // group)
