"""From a call of `topk_indices` to its Triton launches."""

from __future__ import annotations

import triton
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.indexer.topk import count_kernel, store_kernel
from kernelhub.backends.triton.launch import Launcher
from kernelhub.ops.indexer.adapter import TopKAdapter
from kernelhub.ops.indexer.problem import TopKProblem

if triton.knobs.runtime.interpret:
    interpreter.repair()

_BLOCK = 2048  # elements at a time, 8 per thread with 8 warps; a part of a row is worth a program from two blocks on
_MOST_SPLITS = 32  # of a row: every program reads the histograms of all of them
_BINS, _DIGITS = 256, 4


class TopK(TopKAdapter):
    """Four counts and the store. Where there are few rows each is split, which changes no result."""

    def __init__(self, problem: TopKProblem) -> None:
        super().__init__(problem)
        static = {
            "HAS_STARTS": problem.row_starts,
            "HAS_ENDS": problem.row_ends,
            "BLOCK": _BLOCK,
            "MOST": _MOST_SPLITS,
        }
        self._count = [Launcher(count_kernel, {**static, "DIGIT": digit}, 8, 2) for digit in range(_DIGITS)]
        self._store = Launcher(store_kernel, static, 16, 2)

    def launch(self, logits: Tensor, row_starts: Tensor | None, row_ends: Tensor | None, out: Tensor) -> None:
        rows, columns = logits.shape
        splits = self._splits(rows, columns)
        counts = out.new_empty(rows * _DIGITS * splits * _BINS)
        state = out.new_empty(rows * _DIGITS * 2)
        bounds = [0 if bound is None else bound.stride(0) for bound in (row_starts, row_ends)]
        sizes = (columns, self.problem.k, splits, logits.stride(0), logits.stride(1), *bounds)
        variant = (out.get_device(), logits.stride(1), *bounds)
        programs = rows * splits
        with on_device_of(out):
            for count in self._count:
                count(programs, variant, logits, row_starts, row_ends, counts, state, *sizes)
            self._store(
                programs,
                (*variant, out.stride()),
                logits,
                row_starts,
                row_ends,
                counts,
                out,
                *sizes,
                *out.stride(),
            )

    def workspace_bytes(self, num_tokens: int, max_kv_len: int) -> int:
        programs = max((rows * self._splits(rows, max_kv_len) for rows in self._turning(num_tokens)), default=0)
        return 4 * _DIGITS * (max(programs, num_tokens) * _BINS + 2 * num_tokens)

    def _splits(self, rows: int, columns: int) -> int:
        """Parts of a row: four programs per multiprocessor, as far as rows are long enough."""
        wanted: int = -(-4 * self.problem.device.num_sms // rows)
        return max(1, min(wanted, -(-columns // (2 * _BLOCK)), _MOST_SPLITS))

    def _turning(self, most: int) -> range:
        """Numbers of rows up to `most` that are split: of some fewer rows the parts may be more."""
        return range(1, min(most, 4 * self.problem.device.num_sms) + 1)
