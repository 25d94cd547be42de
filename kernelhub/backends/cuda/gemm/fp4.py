"""From a call of `fp4_gemm` with bfloat16 activations to its CUDA launches. The number of rows decides the form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelhub.backends.cuda import library
from kernelhub.backends.cuda.library import Library
from kernelhub.backends.cuda.mapped import Box, MappedKernel, rows_of
from kernelhub.backends.cuda.shapes import C_TYPES
from kernelhub.backends.shared.operands import aligned, contiguous_copy, on_device_of
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.ops.gemm.fp4.adapter import Activations, Fp4GemmAdapter, Weights
from kernelhub.ops.gemm.fp4.problem import GROUP, NVFP4, Fp4GemmProblem
from kernelhub.runtime.counters import counters_of

_SOURCE = "sm_90/fp4_gemm.cu"
_GEMM = "TT" + "P" * 6 + "i" * 10 + "q" * 3
_SUM = "P" * 4 + "i" * 8 + "q" * 2
_GEMM_THREADS, _SUM_THREADS = 384, 256
_STEP = 64  # of K
_MOST_SHARED = 232448  # bytes of a block
_UINT8, _SWIZZLE_32 = 0, 1  # of the driver's CUtensorMapDataType and CUtensorMapSwizzle
_CHUNK = 256  # elements whose scales a thread has at once


@dataclass(frozen=True)
class Cut:
    """How tiles are shared among programs.

    Attributes:
        programs: blocks of the launch.
        split: tiles that are cut.
        each: steps of a part.
    """

    programs: int
    split: int
    each: int


FORMS = (16, 32, 64, 128, 192, 256)  # rows of activations of a tile
_ROWS = 128  # of the weight, of a tile
_FEW = 64  # rows of activations
_OF_192 = 0.86  # of the time of a tile of 256 rows, for one of 192
_WHOLE_FROM = 0.93  # of the multiprocessors: so many tiles are not cut
_LEAST = 4  # steps of a part of a tile that is cut
_TOGETHER = 4  # tiles of activations that are gone over together


def form_for(rows: int) -> int:
    """The least form that has room for so many rows; of more the one that takes least time."""
    fit = next((tokens for tokens in FORMS if rows <= tokens), None)
    if fit is not None:
        return fit
    return 192 if -(-rows // 192) * _OF_192 < -(-rows // 256) else 256


def stages_of(tokens: int, group: int) -> int:
    """Steps that are in shared memory, by the elements of a group."""
    return min(12, (_MOST_SHARED - 4112) // (_stage_bytes(tokens, group) + 16))


def shared_bytes(tokens: int, group: int) -> int:
    """Of a block: operands, scales, results, barriers."""
    return stages_of(tokens, group) * (_stage_bytes(tokens, group) + 16) + 4096 + 16


def _stage_bytes(tokens: int, group: int) -> int:
    return tokens * 128 + _ROWS * (32 + 4 * _STEP // group)


def cut(form: int, rows: int, n: int, k: int, num_sms: int) -> Cut:
    """Whole tiles as long as there are enough for all multiprocessors; the rest is cut into equal parts."""
    tiles, steps = -(-rows // form) * -(-n // _ROWS), -(-k // _STEP)
    split = tiles % num_sms
    if split >= _WHOLE_FROM * num_sms or not split:
        return Cut(min(tiles, num_sms), 0, 1)
    each = max(-(-split * steps // num_sms), min(_LEAST, steps))
    return Cut(num_sms if tiles > split else -(-split * steps // each), split, each)


class Fp4Gemm(Fp4GemmAdapter):
    """A launch; a second one adds up parts where there are no counters for it."""

    form: ClassVar[int | None] = None  # in place of what the rows decide
    counts: ClassVar[bool] = True  # whether the last part of a tile adds up the others

    def __init__(self, problem: Fp4GemmProblem) -> None:
        super().__init__(problem)
        self._repeated = Repeated()
        self._group = GROUP[problem.b_format]
        groups = problem.k // self._group
        self._unit = next(size for size in (_CHUNK // self._group, 2, 1) if not groups % size)
        self._kernels: dict[int, tuple[MappedKernel, MappedKernel]] = {}

    def launch(self, a: Activations, b: Weights, bias: Tensor | None, out: Tensor) -> None:
        self._repeated.run(*_identified(a, b, bias, out), self._launch_anew, a, b, bias, out)

    def repeated(self, a: Activations, b: Weights, bias: Tensor | None, out: Tensor) -> Any:
        return self._repeated.sequence_of(*_identified(a, b, bias, out))

    def _launch_anew(self, a: Activations, b: Weights, bias: Tensor | None, out: Tensor) -> None:
        (rows, n), k = out.shape, self.problem.k
        form = self.form or form_for(rows)
        gemm, add = self._kernels.get(form) or self._made(form)
        of = cut(form, rows, n, k, self.problem.device.num_sms)
        scale = b.scale if b.scale.dtype is torch.uint8 else b.scale.view(torch.uint8)
        if scale.stride(1) != 1 or (scale.stride(0) | scale.data_ptr()) % self._unit:
            scale = contiguous_copy(scale)
        factor = out if b.global_scale is None else b.global_scale
        kind = 0 if bias is None else 1 if bias.dtype is torch.float32 else 2
        with on_device_of(out):
            parts = counters = None
            if of.split:
                parts = out.new_empty(2 * of.programs, _ROWS * form, dtype=torch.float32)
                counters = counters_of(out, of.split) if self.counts else None
            vectors = out.stride(1) == 1 and not (out.stride(0) % 8 or out.data_ptr() & 15)
            common = (rows, n, k, of.split, of.each, _TOGETHER, kind, int(vectors))
            results = factor, out if bias is None else bias, out, out if parts is None else parts
            gemm(
                of.programs,
                rows_of(aligned(a.codes)),
                rows_of(aligned(b.codes)),
                scale,
                *results,
                out if counters is None else counters,
                int(counters is not None),
                self._unit,
                *common,
                scale.stride(0),
                *out.stride(),
            )
            if parts is not None and counters is None:
                add(of.split, *results, *common, *out.stride())

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """The sums of parts."""
        problem, most = self.problem, 0
        for rows in {min(num_tokens, size) for size in (*FORMS, num_tokens)}:
            form = self.form or form_for(rows)
            of = cut(form, rows, problem.n, problem.k, problem.device.num_sms)
            most = max(most, 8 * of.programs * _ROWS * form if of.split else 0)
        return most

    def _made(self, form: int) -> tuple[MappedKernel, MappedKernel]:
        """The product and the sum; those of all forms for many rows are made together, so that no other number does."""
        alike = [one for one in FORMS if one > _FEW] if form > _FEW and self.form is None else [form]
        for one in alike:
            self._kernels[one] = self._one(one)
        return self._kernels[form]

    def _one(self, form: int) -> tuple[MappedKernel, MappedKernel]:
        group = self._group
        constants = constants_of(form, self.problem)
        made: Library = library.library(_SOURCE, constants, self.problem.device, specific=True)
        boxes = Box((form, _STEP)), Box((_ROWS, _STEP // 2), _UINT8, _SWIZZLE_32)
        shared = shared_bytes(form, group)
        return (
            MappedKernel(made, "fp4_gemm", _GEMM, _GEMM_THREADS, shared, boxes),
            MappedKernel(made, "fp4_sum", _SUM, _SUM_THREADS, 0, ()),
        )


def constants_of(form: int, problem: Fp4GemmProblem) -> dict[str, str | int]:
    """What the source is compiled with."""
    group = GROUP[problem.b_format]
    return {
        "TOKENS": form,
        "STAGES": stages_of(form, group),
        "NVFP4": int(problem.b_format == NVFP4),
        "OUT": C_TYPES[problem.out_dtype],
        "ASKED_BYTES": shared_bytes(form, group),
    }


def _identified(a: Activations, b: Weights, bias: Tensor | None, out: Tensor) -> tuple[int, tuple[Tensor, ...]]:
    """The key and the tensors of a call that may be repeated."""
    given = (out, a.codes, b.codes, b.scale, b.global_scale, bias)
    return out.shape[0], tuple([one for one in given if one is not None])
