"""From a call of `fp4_gemm` to its Triton launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.fp4 import LEFT_OF_MX, by_ptx, left_of
from kernelhub.backends.triton.gemm.fp4 import few
from kernelhub.backends.triton.gemm.fp4.decoded import Decoded
from kernelhub.backends.triton.gemm.fp4.gemm import gemm_kernel, sum_kernel
from kernelhub.backends.triton.gemm.fp4.packing import LAYOUT, TILE_K, TILE_N, pack, unpack
from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.planes import Planes, wide, words
from kernelhub.backends.triton.requirements import has_float8
from kernelhub.ops.gemm.fp4.adapter import Activations, Fp4GemmAdapter, Weights
from kernelhub.ops.gemm.fp4.problem import FP8, GROUP, MXFP4, Fp4GemmProblem
from kernelhub.ops.packed import PackedWeight, PackingAdapter, Tensors
from kernelhub.runtime.counters import counters_of, no_counters

if triton.knobs.runtime.interpret:
    interpreter.repair()

FEW = 32  # rows of a up to which operands are swapped and K is split
_FEW_OF_QUADS = 64
# From how many on the weight is decoded once for all of them, and the product is cuBLAS's: on an H200 the faster way
# with each of five layers, by 1.1 to 1.9 (384 rows: from 0.9 to 2.1).
DECODED_FROM = 512
_SUM_BLOCK = 1024
# Rows up to which the launch of the product adds up its parts, too, where there are counters. H200, one launch / two,
# us, 1, 16 and 32 rows: 4096 x 4096 9.1 / 10.3, 10.2 / 11.0 and 12.0 / 12.1 (benchmarks/results/one_launch_h200.json).
ONE_LAUNCH_ROWS = 16


@dataclass(frozen=True)
class Tiles:
    """Sizes of one launch."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def quads_tiles(problem: Fp4GemmProblem, block_m: int) -> Tiles:
    """Of four products, each a quarter of a step deep, computed transposed."""
    if problem.device.family not in ("hopper", "blackwell"):
        return Tiles(min(block_m, 64), 64, 64, 4, 3)
    if block_m <= _FEW_OF_QUADS:
        return Tiles(block_m, 64, 128, 4, 3)
    # Of more than 64 rows Triton 3.7 makes empty kernels for tcgen05. 4096 x 8192 x 8192, nvfp4, took 1.21 ms on an
    # H200, with steps of 64 1.57.
    return Tiles(block_m if problem.device.family == "hopper" else 64, 128, 128, 8, 3)


def few_tiles(problem: Fp4GemmProblem, block_m: int) -> Tiles:
    """For few rows: 64 rows of the weight make a whole wgmma or tcgen05, and 128 elements a piece of 64 bytes."""
    return Tiles(block_m, 64, _block_k(problem, 128), 4, 3)


def many_tiles(problem: Fp4GemmProblem, rows: int) -> Tiles:
    """For more: the accumulator and two decoded operands fit the registers without spills (ahead-of-time report)."""
    wide = problem.device.capability >= (9, 0) and problem.device.shared_memory_bytes > 128 << 10
    if rows <= 64:
        return Tiles(64, 64, _block_k(problem, 64), 4, 3)
    return Tiles(128, 128 if wide else 64, _block_k(problem, 64), 8, 3)


def _block_k(problem: Fp4GemmProblem, most: int) -> int:
    """One group where its scale multiplies the product."""
    return 32 if _scale_after(problem) else most


def _scale_after(problem: Fp4GemmProblem) -> bool:
    """float16 holds no scales of mxfp4."""
    return problem.a_format == "float16" and problem.b_format == MXFP4


class Fp4Gemm(Fp4GemmAdapter, PackingAdapter):
    """`fp4_gemm`: swapped operands and a split K for few rows, one launch for more, and a decoded weight for many.

    On Hopper `few.py` has kernels of their own for up to 64 rows.
    """

    def __init__(self, problem: Fp4GemmProblem) -> None:
        super().__init__(problem)
        device = problem.device
        self._packed = problem.weight_layout == LAYOUT
        self._native = has_float8(device)
        self._quads = problem.a_format in ("bfloat16", "float16") and not _scale_after(problem)
        ptx = self._quads and by_ptx(device.vendor, problem.a_format, problem.b_format)
        self._ptx = ptx
        self._left = left_of(problem.b_format, problem.a_format, ptx) * LEFT_OF_MX.get(problem.a_format, 1.0)
        self._few = _FEW_OF_QUADS if self._quads else FEW
        self._planes = Planes(problem.k)
        self._repeated = Repeated()
        # torch multiplies into float32 on NVIDIA GPUs only.
        self._decoded = Decoded(problem, self._packed) if self._quads and device.vendor in ("nvidia", "cpu") else None
        self._launchers: dict[tuple[int, bool], tuple[Launcher, int, Tiles]] = {}
        self._few_rows: dict[tuple[int, bool], few.FewRows | None] = {}
        self._splits = self._launcher_of(16, True)[1]
        static = {
            "N": problem.n,
            "A_FORMAT": problem.a_format,
            "B_FORMAT": problem.b_format,
            "HAS_BIAS": problem.bias,
            "SPLITS": self._splits,
            "LEFT": self._left,
            "BLOCK_N": _SUM_BLOCK,
        }
        self._sum = Launcher(sum_kernel, static, num_warps=4)

    def _launcher_of(self, rows: int, in_words: bool) -> tuple[Launcher, int, Tiles]:
        """The launcher by the number of rows: up to 16, 32, 64, or more."""
        size = next((size for size in (16, 32, 64) if rows <= size), 128)
        made = self._launchers.get((size, in_words))
        if made is None:
            made = self._launchers[size, in_words] = self._launcher(size, in_words)
        return made

    def _few_rows_of(self, rows: int, in_words: bool) -> few.FewRows | None:
        """What multiplies so few rows; None where the kernel of all sizes does."""
        size = next((size for size in few.SIZES if rows <= size), 0)
        if (size, in_words) in self._few_rows:
            return self._few_rows[size, in_words]
        form = few.form_of(self.problem, size) if size and self._quads else None
        made = None
        if form is not None:
            made = few.FewRows(self.problem, form, size, self._packed, in_words, self._native, self._ptx, self._left)
        self._few_rows[size, in_words] = made
        return made

    def _launcher(self, size: int, in_words: bool) -> tuple[Launcher, int, Tiles]:
        problem = self.problem
        few = size <= self._few
        choose = quads_tiles if self._quads else few_tiles if few else many_tiles
        tiles = choose(problem, size)
        splits = 1
        if few:
            # Four programs for each multiprocessor, of at least four steps of K each: a program has two steps of 4.6 KB
            # of the weight in flight, and an H200 needs some 33 KB a multiprocessor (4.3 TB/s over a microsecond).
            programs = -(-problem.n // tiles.block_n)
            steps = -(-problem.k // tiles.block_k)
            splits = max(1, min(4 * problem.device.num_sms // programs, steps // 4, 16))
        static = {
            "N": problem.n,
            "K": problem.k,
            "A_FORMAT": problem.a_format,
            "B_FORMAT": problem.b_format,
            "A_GROUP": GROUP.get(problem.a_format, 0),
            "B_GROUP": GROUP[problem.b_format],
            "SCALE_AFTER": _scale_after(problem),
            "TILE_N": TILE_N if self._packed else 0,
            "TILE_K": TILE_K if self._packed else 0,
            "HAS_BIAS": problem.bias,
            "SWAP": few or self._quads,
            "SPLITS": splits,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
            "GROUP_M": 8,
            "NATIVE": self._native,
            "QUADS": self._quads,
            "PTX": self._ptx,
            "WIDE": in_words,
            "LEFT": self._left,
        }
        return Launcher(gemm_kernel, static, tiles.num_warps, tiles.num_stages), splits, tiles

    def workspace_bytes(self, **sizes: int) -> int:
        """Parts of a split K, and planes, or a decoded weight, for up to `num_tokens` rows."""
        tokens, decoded = sizes["num_tokens"], 0
        if self._decoded is not None and tokens >= DECODED_FROM:
            decoded = self._decoded.workspace_bytes(tokens)
            tokens = DECODED_FROM
        parts = 4 * self._splits * min(tokens, self._few) * self.problem.n if self._splits > 1 else 0
        most = max(decoded, parts + (2 * tokens * self.problem.k if self._quads else 0))
        for size in few.SIZES:
            few_rows = self._few_rows_of(size, True)
            if few_rows is not None:
                most = max(most, few_rows.workspace_bytes(min(tokens, size)))
        return most

    def pack(self, *weight: Tensor | None) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        codes, scale, global_scale = weight
        assert codes is not None
        assert scale is not None
        group = GROUP[self.problem.b_format]
        tiles, scales = pack(codes.view(torch.uint8), scale.view(torch.uint8), group)
        return {"codes": tiles, "scale": scales, "global_scale": global_scale}, unpack

    def launch(self, a: Activations, b: Weights, bias: Tensor | None, out: Tensor) -> None:
        self._repeated.run(*_identified(a, b, bias, out), self._launch_anew, a, b, bias, out)

    def repeated(self, a: Activations, b: Weights, bias: Tensor | None, out: Tensor) -> Any:
        return self._repeated.sequence_of(*_identified(a, b, bias, out))

    def _launch_anew(self, a: Activations, b: Weights, bias: Tensor | None, out: Tensor) -> None:
        rows, n = out.shape
        if self._decoded is not None and rows >= DECODED_FROM:
            with on_device_of(out):
                self._decoded.launch(a, b, bias, out)
            return
        codes, b_codes, scale = a.codes, b.codes, a.scale
        if codes.itemsize == 1 and codes.dtype is not torch.uint8:
            codes = codes.view(torch.uint8)
        b_scale = b.scale if b.scale.dtype is torch.uint8 else b.scale.view(torch.uint8)
        if scale is not None and scale.itemsize == 1 and scale.dtype is not torch.uint8:
            scale = scale.view(torch.uint8)
        by_row, by_group, row_step = 0, 0, 0
        if scale is not None and self.problem.a_format == FP8:
            row_step = scale.stride(0) if scale.shape[0] > 1 else 0
        elif scale is not None:
            by_row, by_group = scale.stride()
        alignment, in_words = codes.data_ptr() | b_codes.data_ptr() | b_scale.data_ptr(), False
        b_strides: tuple[int, ...] = (0, 1, 0, 1)
        if self._packed:
            in_words = self._quads and not b_codes.data_ptr() & 15
            b_codes = b_codes.view(torch.int16) if in_words else b_codes
        else:
            of_codes: tuple[int, ...] = b_codes.stride()
            if self._quads and wide(b_codes):
                in_words = True
                b_codes, of_codes = words(b_codes)
            b_strides = (*of_codes, *b_scale.stride())
        few_rows = self._few_rows_of(rows, in_words)
        if few_rows is not None:
            with on_device_of(out):
                few_rows.launch(codes, b_codes, b_strides, b_scale, b.global_scale, bias, out)
            return
        launcher, splits, tiles = self._launcher_of(rows, in_words)
        parts = counters = None
        tiles_of_out = -(-rows // tiles.block_m) * -(-n // tiles.block_n)
        if splits > 1:
            parts = out.new_empty((splits, rows, n), dtype=torch.float32)
            counters = counters_of(out, tiles_of_out) if rows <= ONE_LAUNCH_ROWS else None
        if self._quads:
            with on_device_of(out):
                codes = self._planes(codes)
        strides = (*codes.stride(), by_row, by_group, *b_strides, *out.stride())
        variant: Any = None
        if not (alignment | codes.data_ptr() | (0 if parts is None else parts.data_ptr()) | out.data_ptr()) & 15:
            variant = (out.get_device(), strides, None if bias is None else bias.dtype)
        with on_device_of(out):
            launcher(
                tiles_of_out * splits,
                variant,
                codes,
                scale,
                a.global_scale,
                b_codes,
                b_scale,
                b.global_scale,
                bias,
                out,
                parts,
                no_counters(out) if parts is not None and counters is None else counters,
                rows,
                int(counters is not None),
                row_step,
                *strides,
            )
            if parts is not None:
                # Calls without counters, such as captured ones, need the second kernel.
                add = self._sum if counters is None else self._sum.prepare
                add(
                    rows * -(-n // _SUM_BLOCK),
                    variant,
                    parts,
                    scale,
                    a.global_scale,
                    b.global_scale,
                    bias,
                    out,
                    rows,
                    row_step,
                    *out.stride(),
                )


def _identified(a: Activations, b: Weights, bias: Tensor | None, out: Tensor) -> tuple[int, tuple[Tensor, ...]]:
    """The key and the tensors of a call that may be repeated."""
    given = (out, a.codes, b.codes, b.scale, a.scale, a.global_scale, b.global_scale, bias)
    return out.shape[0], tuple([one for one in given if one is not None])
