"""From a call of `quantize_fp8` to its CUDA launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.cuda import library
from kernelhub.backends.cuda.shapes import C_TYPES, VECTOR_BYTES, WARP, blocks_for, in_vectors
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.ops.quant.adapter import QuantizeAdapter
from kernelhub.ops.quant.problem import TOKEN

_PACKING = "3P" + "8q"
_BLOCK, _LARGEST_BLOCK, _GROUP = 256, 1024, 128
_GROUPS_BLOCK = 128
_THREADS = {1: 256, 2: 256, 4: 512}  # of the largest block, by the vectors that a thread keeps
_MOST_INDEX = 2**32 - 4 * _BLOCK  # of a thread, where one is counted in 32 bits


class QuantizeFp8(QuantizeAdapter):
    """`quantize_fp8` per token and per group of 128, in one launch."""

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        self._repeated = Repeated()
        size = getattr(torch, problem.dtype).itemsize
        e8m0 = problem.scale_dtype == "float8_e8m0fnu"
        constants = {"ELEMENT": C_TYPES[problem.dtype], "SIZE": size, "UE8M0": int(problem.ue8m0), "E8M0": int(e8m0)}
        made = library.library("quantize_fp8.cu", constants, problem.device)
        self._each, self._by_token = VECTOR_BYTES // size, problem.granularity == TOKEN
        names = (
            ("row_by_elements", "row_of_1", "row_of_2", "row_of_4")
            if self._by_token
            else ("groups_by_elements", "groups_by_1", "groups_by_2", "groups_by_4")
        )
        self._kernels = {name: made.kernel(name, _PACKING) for name in names}

    def launch(self, x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> None:
        self._repeated.run(x.shape, (x, codes, scale), self._launch_anew, x, codes, scale)

    def repeated(self, x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> Any:
        return self._repeated.sequence_of(x.shape, (x, codes, scale))

    def _launch_anew(self, x: Tensor, codes: Tensor, scale: Tensor) -> None:
        rows, columns = x.shape
        vectors = columns % self._each == 0 and in_vectors(x, self._each) and in_vectors(codes, self._each)
        name, blocks, threads = (self._rows if self._by_token else self._groups)(rows, columns, vectors)
        self._kernels[name](
            x.get_device(),
            blocks,
            threads,
            x,
            codes,
            scale,
            rows,
            columns,
            *x.stride(),
            *codes.stride(),
            *scale.stride(),
        )

    def _rows(self, rows: int, columns: int, vectors: bool) -> tuple[str, int, int]:
        """Kernel, blocks and threads: as few vectors a thread as a block has room for; one where rows are few."""
        count = columns // self._each
        if vectors and rows <= self.problem.device.num_sms and count <= _LARGEST_BLOCK:
            return "row_of_1", rows, WARP * blocks_for(count, WARP)
        for each, most in _THREADS.items() if vectors else ():
            if count <= each * most:
                return f"row_of_{each}", rows, WARP * blocks_for(blocks_for(count, each), WARP)
        return "row_by_elements", rows, min(_LARGEST_BLOCK, WARP * blocks_for(columns, WARP))

    def _groups(self, rows: int, columns: int, vectors: bool) -> tuple[str, int, int]:
        groups, lanes = rows * blocks_for(columns, _GROUP), _GROUP // self._each
        if vectors and groups * lanes < _MOST_INDEX:
            wide = wide_of(groups * lanes, self.problem.device.num_sms)
            return f"groups_by_{wide}", blocks_for(groups * lanes, wide * _GROUPS_BLOCK), _GROUPS_BLOCK
        return "groups_by_elements", blocks_for(groups * WARP, _BLOCK), _BLOCK


def wide_of(vectors: int, num_sms: int) -> int:
    """Vectors of a group that a thread has: few where multiprocessors would be idle.

    On an H200 rows of 7168 take, by 1, 2 and 4, with 128 rows 2.67, 3.01 and 3.38 us, with 512 5.41, 4.69 and 4.88,
    with 8192 71.6, 49.1 and 46.9 (benchmarks/results/small_ops_forms_h200.json).
    """
    return 4 if vectors >= 4096 * num_sms else 2 if vectors >= 2048 * num_sms else 1
