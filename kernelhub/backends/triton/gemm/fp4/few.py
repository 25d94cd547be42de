"""Launches of the products of few rows with a float4 weight on Hopper, and which form each size takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.triton.gemm.fp4.gemm import sum_kernel
from kernelhub.backends.triton.gemm.fp4.packing import TILE_N
from kernelhub.backends.triton.gemm.fp4.parts import parts_kernel
from kernelhub.backends.triton.gemm.fp4.pieces import piece_planes_kernel
from kernelhub.backends.triton.gemm.fp4.sliced import sliced_kernel
from kernelhub.backends.triton.launch import Launcher
from kernelhub.ops.gemm.fp4.problem import MXFP4, NVFP4, Fp4GemmProblem
from kernelhub.runtime.counters import counters_of, no_counters

SIZES = (8, 16, 32, 64)  # rows that a tile holds
_PIECE = 128
_PLANES_PIECES, _SUM_BLOCK = 8, 1024


@dataclass(frozen=True)
class Sliced:
    """`sliced_kernel`: one program has all of K for `block_n` columns, its warps share it."""

    block_n: int
    num_warps: int
    pieces: int
    num_stages: int


@dataclass(frozen=True)
class Split:
    """`parts_kernel`: K is split among up to `each_sm` programs for each multiprocessor.

    `one_launch`: the last program of a tile adds up the parts, where there are counters; else another launch does.
    """

    block_n: int
    num_warps: int
    pieces: int
    num_stages: int
    each_sm: int
    one_launch: bool = True


Form = Sliced | Split

_TENS = Split(128, 4, 1, 3, each_sm=2, one_launch=False)
_FEW = Split(64, 4, 2, 3, each_sm=4)
# Up to 8, 16, 32 and 64 rows; None: the kernel of all sizes is as fast, or faster. us on an H200 with 1, 16, 32 and 64
# rows, that kernel / these (benchmarks/results/float4_few_rows_h200.json):
# mxfp4, 4096 x 4096   11.4 / 9.75, 12.2, 13.8 / 12.4, 20.6 / 15.3; 6144 x 4096 14.9 / 12.9, 15.6 / 13.3, 18.5 / 15.0,
#   27.3 / 18.6; 4096 x 14336 26.2 / 22.1, 27.9 / 22.7, 29.4 / 23.6, 49.0 / 30.7; 28672 x 4096 42.9 / 39.3, 47.9 / 36.8,
#   54.6 / 41.5, 78.3 / 64.5.
# nvfp4, 4096 x 4096   9.96, 10.9, 12.5 / 12.5, 17.7 / 15.4; 6144 x 4096 13.0, 13.7, 16.1 / 15.2, 23.3 / 18.3;
#   4096 x 14336 20.9, 22.3, 24.7 / 24.1, 36.8 / 30.0; 28672 x 4096 37.0, 39.5 / 35.5, 40.5 / 39.1, 63.0 / 54.3.
FORMS: dict[tuple[str, str], tuple[Form | None, ...]] = {
    (MXFP4, "small"): (Sliced(32, 4, 1, 3), None, _TENS, _TENS),
    (MXFP4, "medium"): (_FEW, _FEW, _TENS, _TENS),
    (MXFP4, "wide"): (Sliced(32, 4, 1, 3), _FEW, Split(128, 8, 2, 3, each_sm=2), Split(256, 8, 1, 3, each_sm=1)),
    (NVFP4, "small"): (None, None, _TENS, _TENS),
    (NVFP4, "medium"): (None, None, _TENS, _TENS),
    (NVFP4, "wide"): (None, _FEW, Split(128, 8, 2, 3, each_sm=2), Split(128, 8, 1, 3, each_sm=2)),
}


def form_of(problem: Fp4GemmProblem, size: int) -> Form | None:
    """What multiplies up to `size` rows, one of `SIZES`, by a weight of words; None for the kernel of all sizes."""
    if problem.device.family != "hopper":
        return None
    kind = kind_of(problem.n, problem.k)
    return None if kind is None else FORMS[problem.b_format, kind][SIZES.index(size)]


def kind_of(n: int, k: int) -> str | None:
    """The measured weight that one of this shape is like; None if it is like none.

    Between 16384 and 24576 columns, and beyond 32768, the tiles of wide weights fill the multiprocessors badly; below
    3072 there are too few programs.
    """
    if 24576 <= n <= 32768:
        return "wide"
    if 3072 <= n < 16384:
        return "small" if n * k <= 1 << 24 else "medium"
    return None


class FewRows:
    """Launches one form for up to `size` rows."""

    def __init__(
        self,
        problem: Fp4GemmProblem,
        form: Form,
        size: int,
        packed: bool,
        wide: bool,
        native: bool,
        ptx: bool,
        left: float,
    ) -> None:
        self._problem = problem
        self._form = form
        step = _PIECE * form.pieces * (form.num_warps if isinstance(form, Sliced) else 1)
        static: dict[str, Any] = {
            "A_FORMAT": problem.a_format,
            "B_FORMAT": problem.b_format,
            "TILE_N": TILE_N if packed else 0,
            "WIDE": wide,
            "WHOLE": problem.k % step == 0,
            "HAS_BIAS": problem.bias,
            "NATIVE": native,
            "PTX": ptx,
            "LEFT": left,
            "PIECES": form.pieces,
            "BLOCK_M": size,
            "BLOCK_N": form.block_n,
        }
        self._programs = -(-problem.n // form.block_n)
        self.splits = 1
        if isinstance(form, Sliced):
            static["SLICES"] = form.num_warps
            self._launcher = Launcher(sliced_kernel, static, form.num_warps, form.num_stages)
            return
        steps = max(problem.k // step, 1)
        most = max(1, min(form.each_sm * problem.device.num_sms // self._programs, steps // 2, 16))
        each = -(-steps // most)
        self.splits = -(-steps // each)  # each part has a step
        static["SPLIT"] = self.splits > 1
        self._launcher = Launcher(parts_kernel, static, form.num_warps, form.num_stages)
        self._planes = Launcher(piece_planes_kernel, {"PIECES": _PLANES_PIECES}, num_warps=4, num_stages=1)
        static = {
            "N": problem.n,
            "A_FORMAT": problem.a_format,
            "B_FORMAT": problem.b_format,
            "HAS_BIAS": problem.bias,
            "SPLITS": self.splits,
            "LEFT": left,
            "BLOCK_N": _SUM_BLOCK,
        }
        self._sum = Launcher(sum_kernel, static, num_warps=4)

    def workspace_bytes(self, rows: int) -> int:
        """Planes, and parts of a split K."""
        if isinstance(self._form, Sliced):
            return 0
        parts = 4 * self.splits * rows * self._problem.n if self.splits > 1 else 0
        return parts + 2 * rows * -(-self._problem.k // _PIECE) * _PIECE

    def launch(
        self,
        a: Tensor,
        b: Tensor,
        strides_of_b: tuple[int, ...],
        scale: Tensor,
        global_scale: Tensor | None,
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        """On the current device.

        Args:
            a: [M, K] of any strides.
            b: words of 16 bits, or bytes.
            strides_of_b: of b, that of rows of words in units of 16 bytes, and of the scales.
            scale: bytes.
            global_scale, bias, out: as of the op.
        """
        problem = self._problem
        rows, n, k = len(out), problem.n, problem.k
        addresses = a.data_ptr() | b.data_ptr() | scale.data_ptr() | out.data_ptr()
        strides = (*strides_of_b, *out.stride())
        if isinstance(self._form, Sliced):
            variant: Any = None
            if not addresses & 15:
                variant = (out.get_device(), a.stride(), strides, None if bias is None else bias.dtype)
            self._launcher(
                self._programs, variant, a, b, scale, global_scale, bias, out, rows, n, k, *a.stride(), *strides
            )
            return
        tiles = -(-k // _PIECE)
        planes = torch.empty(rows, tiles * _PIECE, dtype=a.dtype, device=a.device)
        variant = None if a.data_ptr() & 15 else (out.get_device(), a.stride())
        programs = rows * -(-tiles // _PLANES_PIECES)
        self._planes(programs, variant, a, planes, k, *a.stride())
        parts = counters = None
        if self.splits > 1:
            parts = torch.empty(self.splits, rows, n, dtype=torch.float32, device=a.device)
            counters = counters_of(out, self._programs) if self._form.one_launch else None
        variant = None
        if not addresses & 15:
            variant = (out.get_device(), strides, None if bias is None else bias.dtype)
        self._launcher(
            self._programs * self.splits,
            variant,
            planes,
            b,
            scale,
            global_scale,
            bias,
            out,
            parts,
            no_counters(out) if parts is not None and counters is None else counters,
            rows,
            n,
            k,
            self.splits,
            int(counters is not None),
            *strides,
        )
        if parts is not None:
            # Calls without counters need the second kernel.
            add = self._sum if counters is None else self._sum.prepare
            add(
                rows * -(-n // _SUM_BLOCK),
                variant,
                parts,
                None,
                None,
                global_scale,
                bias,
                out,
                rows,
                0,
                *out.stride(),
            )
