"""From calls of `rms_norm_quant` and `silu_and_mul_quant` to their CUDA launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.backends.cuda import library
from kernelhub.backends.cuda.shapes import C_TYPES, VECTOR_BYTES, WARP, blocks_for, in_vectors
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.ops.fused_quant.adapter import ActivationAdapter, NormAdapter
from kernelhub.ops.fused_quant.problem import (
    FORMATS,
    FP8_GROUP,
    FP8_TOKEN,
    NVFP4,
    ActivationProblem,
    FusedProblem,
    NormProblem,
)

_PACKING = "7P" + "12q" + "f"
_BLOCK = 256  # threads of a block of several rows, or of stretches of rows
_FEW_BLOCK = 128


class Layout(NamedTuple):
    """How threads share rows.

    Attributes:
        each: vectors that a thread keeps.
        lanes: threads of a row, or of a stretch of it.
        rows: rows of a block.
        chunks: stretches of a row.
    """

    each: int
    lanes: int
    rows: int
    chunks: int


def layout_of(vectors: int, whole: bool, few: bool = False) -> Layout:
    """The layout for rows of so many vectors; `whole` if a block must see all of a row.

    On an H200 a norm of 7168 by group takes with 1, 2 and 4 vectors of a thread 109, 102 and 104 us for 8192 rows, and
    4.4, 4.6 and 5.3 for 128. SiLU of 2048 takes with 128 and 256 threads 1.05 and 1.21 us for 8 rows, 22.9 and 22.5
    for 8192 (benchmarks/results/small_ops_forms_h200.json).
    """
    if vectors <= WARP:
        lanes = WARP  # all of a warp, so that groups do not span rows
        return Layout(1, lanes, _BLOCK // lanes, 1)
    if not whole:
        lanes = _FEW_BLOCK if few else _BLOCK
        return Layout(1, lanes, 1, blocks_for(vectors, lanes))
    each = 1 if vectors <= _BLOCK else 2 if vectors <= 4 * _BLOCK else 4
    return Layout(each, WARP * blocks_for(blocks_for(vectors, each), WARP), 1, 1)


class _Rows:
    """The compiled kernels of a problem."""

    def __init__(self, problem: FusedProblem, operation: int, constants: dict[str, str | int]) -> None:
        self._repeated = Repeated()
        size = getattr(torch, problem.dtype).itemsize
        self._each, self._narrow = VECTOR_BYTES // size, problem.format == NVFP4
        whole = operation == 0 or problem.format == FP8_TOKEN
        vectors = blocks_for(problem.width, self._each)
        self._row_vectors = vectors
        self._layout, self._few = (layout_of(vectors, whole, few) for few in (False, True))
        common: dict[str, str | int] = {
            "OPERATION": operation,
            "ELEMENT": C_TYPES[problem.dtype],
            "SIZE": size,
            "WIDTH": problem.width,
            "FORMAT": FORMATS.index(problem.format),
            "UE8M0": int(problem.ue8m0),
            "E8M0": int(problem.scale_dtype == "float8_e8m0fnu"),
            "EACH": self._layout.each,
            "LANES": self._layout.lanes,
            "ROWS": self._layout.rows,
            "CHUNKS": self._layout.chunks,
            "FEW_LANES": self._few.lanes,
            "FEW_CHUNKS": self._few.chunks,
            "WIDE": int(problem.format == FP8_GROUP),
        }
        made = library.library("fused_quant.cu", common | constants, problem.device)
        self._elements = made.kernel("rows_by_elements", _PACKING)
        whole_vectors = problem.width % self._each == 0
        self._vectors = made.kernel("rows_by_vectors", _PACKING) if whole_vectors else None
        has_few = whole_vectors and self._few != self._layout
        self._few_vectors = made.kernel("few_by_vectors", _PACKING) if has_few else None
        self._most_few = _BLOCK * problem.device.num_sms  # vectors

    def launch(
        self,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        residual: Tensor | None,
        given_scale: Tensor | None,
        out: Tensor,
        scale: Tensor | None,
        residual_out: Tensor | None,
    ) -> None:
        """Launch for all rows."""
        given = (x, weight, eps, residual, given_scale, out, scale, residual_out)
        tensors = [tensor for tensor in given if isinstance(tensor, Tensor)]
        self._repeated.run((x.shape[0], eps), tensors, self._launch_anew, *given)

    def repeated(self, x: Tensor, weight: Tensor | None, eps: float, *more: Tensor | None) -> Any:
        """What a known call takes to make a launch again."""
        return self._repeated.sequence_of((x.shape[0], eps), [one for one in (x, weight, *more) if one is not None])

    def _launch_anew(
        self,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        residual: Tensor | None,
        given_scale: Tensor | None,
        out: Tensor,
        scale: Tensor | None,
        residual_out: Tensor | None,
    ) -> None:
        moved = (x, weight, residual, residual_out, None if self._narrow else out)
        kernel, rows, layout = self._elements, x.shape[0], self._layout
        if self._vectors is not None and all(part is None or in_vectors(part, self._each) for part in moved):
            kernel = self._vectors
            if self._few_vectors is not None and rows * self._row_vectors <= self._most_few:
                kernel, layout = self._few_vectors, self._few
        kernel(
            x.get_device(),
            blocks_for(rows, layout.rows) * layout.chunks,
            layout.lanes * layout.rows,
            x,
            _or_none(weight),
            _or_none(residual),
            _or_none(given_scale),
            out,
            _or_none(scale),
            _or_none(residual_out),
            rows,
            *x.stride(),
            0 if weight is None else weight.stride(0),
            *_strides(residual),
            *out.stride(),
            *_strides(scale),
            *_strides(residual_out),
            eps,
        )


def _or_none(tensor: Tensor | None) -> Tensor | int:
    return 0 if tensor is None else tensor


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if tensor is None else tensor.stride()


class Norm(NormAdapter):
    """`rms_norm_quant` in one launch."""

    def __init__(self, problem: NormProblem) -> None:
        super().__init__(problem)
        constants: dict[str, str | int] = {
            "WEIGHT": C_TYPES[problem.weight_dtype],
            "RESIDUAL": int(problem.residual),
            "UNIT_OFFSET": int(problem.unit_offset),
        }
        self._rows = _Rows(problem, 0, constants)

    def launch(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None,
        given_scale: Tensor | None,
        out: Tensor,
        scale: Tensor | None,
        residual_out: Tensor | None,
    ) -> None:
        self._rows.launch(x, weight, eps, residual, given_scale, out, scale, residual_out)

    def repeated(self, x: Tensor, weight: Tensor, eps: float, *more: Tensor | None) -> Any:
        return self._rows.repeated(x, weight, eps, *more)


class Activation(ActivationAdapter):
    """`silu_and_mul_quant` in one launch."""

    def __init__(self, problem: ActivationProblem) -> None:
        super().__init__(problem)
        self._rows = _Rows(problem, 1, {"WEIGHT": C_TYPES[problem.dtype], "RESIDUAL": 0, "UNIT_OFFSET": 0})

    def launch(self, x: Tensor, given_scale: Tensor | None, out: Tensor, scale: Tensor | None) -> None:
        self._rows.launch(x, None, 0.0, None, given_scale, out, scale, None)

    def repeated(self, x: Tensor, *more: Tensor | None) -> Any:
        return self._rows.repeated(x, None, 0.0, *more)
