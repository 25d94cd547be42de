"""From a call of `topk_indices` to its CUDA launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernelhub.backends.cuda import library
from kernelhub.backends.cuda.shapes import in_vectors
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.ops.indexer.adapter import TopKAdapter
from kernelhub.ops.indexer.problem import TopKProblem

_PACKING = "4P" + "7q"
_VECTOR = 4


class TopK(TopKAdapter):
    """A block for a row."""

    def __init__(self, problem: TopKProblem) -> None:
        super().__init__(problem)
        self._repeated = Repeated()
        made = library.library("topk_indices.cu", {"K": problem.k}, problem.device)
        self._elements = made.kernel("select_elements", _PACKING)
        self._vectors = made.kernel("select_vectors", _PACKING)

    def launch(self, logits: Tensor, row_starts: Tensor | None, row_ends: Tensor | None, out: Tensor) -> None:
        given = (logits, row_starts, row_ends, out)
        self._repeated.run(*self.identified(*given), self._launch_anew, *given)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(*self.identified(*given))

    def _launch_anew(self, logits: Tensor, row_starts: Tensor | None, row_ends: Tensor | None, out: Tensor) -> None:
        rows, columns = logits.shape
        (self._vectors if in_vectors(logits, _VECTOR) else self._elements)(
            out.get_device(),
            rows,
            self._threads(rows, columns),
            logits,
            0 if row_starts is None else row_starts,
            0 if row_ends is None else row_ends,
            out,
            columns,
            *logits.stride(),
            0 if row_starts is None else row_starts.stride(0),
            0 if row_ends is None else row_ends.stride(0),
            *out.stride(),
        )

    def _threads(self, rows: int, columns: int) -> int:
        """Of a block: a large one if it has a multiprocessor to itself, else several blocks hide each other's waits."""
        if columns <= 2048:
            return 256
        return 1024 if columns > 8192 and rows <= 2 * self.problem.device.num_sms else 512
