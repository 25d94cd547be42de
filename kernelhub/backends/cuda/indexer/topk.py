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
_HAVE_CLUSTERS = (9, 0)
_SHARED = (2, 4, 8)  # blocks of a row; 8 are a cluster on every GPU that has them


class TopK(TopKAdapter):
    """A block for a row, or a cluster of blocks where rows are few and long."""

    def __init__(self, problem: TopKProblem) -> None:
        super().__init__(problem)
        self._repeated = Repeated()
        # Blocks that wait take room from the launch before: 256 rows of 32768 took 68 us on an H200, and 50 without.
        made = library.library("topk_indices.cu", {"K": problem.k, "OVERLAPS": 0}, problem.device)
        shared = _SHARED if problem.device.capability >= _HAVE_CLUSTERS else ()
        self._kernels = {
            (blocks, each): made.kernel(
                f"{'select' if blocks == 1 else 'share'}_{'elements' if each == 1 else 'vectors'}", _PACKING, blocks
            )
            for blocks in (1, *shared)
            for each in (1, _VECTOR)
        }
        self._shares = bool(shared)

    def launch(self, logits: Tensor, row_starts: Tensor | None, row_ends: Tensor | None, out: Tensor) -> None:
        given = (logits, row_starts, row_ends, out)
        self._repeated.run(*self.identified(*given), self._launch_anew, *given)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(*self.identified(*given))

    def _launch_anew(self, logits: Tensor, row_starts: Tensor | None, row_ends: Tensor | None, out: Tensor) -> None:
        rows, columns = logits.shape
        blocks, threads = self._blocks_and_threads(rows, columns)
        self._kernels[blocks, _VECTOR if in_vectors(logits, _VECTOR) else 1](
            out.get_device(),
            rows,
            threads,
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

    def _blocks_and_threads(self, rows: int, columns: int) -> tuple[int, int]:
        return blocks_and_threads(rows, columns, self.problem.device.num_sms, self._shares)


def blocks_and_threads(rows: int, columns: int, num_sms: int, shares: bool) -> tuple[int, int]:
    """Blocks of a row, and threads of each: the best of all on an H200, or within 2 % of it, in 33 sizes.

    Blocks of 1024 threads where each has a multiprocessor to itself and enough to do; else smaller ones, which hide
    each other's waits. `benchmarks/results/topk_clusters_h200.json` has the sizes.
    """
    if columns <= 2048:
        return 1, 256
    if columns <= 4096:
        return 1, 512
    if not shares or 2 * rows > num_sms:
        return 1, 1024 if columns > 8192 and rows <= 2 * num_sms * 15 // 16 else 512
    if 16 * rows <= num_sms:
        return 8, 1024 if columns > 32768 else 512
    if 4 * rows > num_sms:
        return 2, 1024
    if columns <= 8192:
        return 1, 1024
    if columns <= 16384:
        return 4, 512
    return 8, 512 if 8 * rows <= num_sms else 256
