"""From a call of `topk_indices` to the launches of the search."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.indexer.topk_search import select_kernel
from kernelhub.backends.triton.launch import Launcher
from kernelhub.ops.indexer.adapter import TopKAdapter
from kernelhub.ops.indexer.problem import TopKProblem

if triton.knobs.runtime.interpret:
    interpreter.repair()

# By elements of a program. On an H200 1024 rows of 8192 take 0.089 ms with 8 warps, 0.108 with 16; 4096 of 32768 take
# 1.7 by parts of 8192 or 16384, 2.2 of 32768; 64 of 65536 take 0.096 ms by parts of 8192, 0.081 by 16384 and then 8192.
_WARPS = {4096: 8, 8192: 8, 16384: 16}


class Search(TopKAdapter):
    """A launch where a program holds a row, one or more further ones where it holds a part."""

    def __init__(self, problem: TopKProblem) -> None:
        super().__init__(problem)
        self._launchers: dict[tuple[int, bool], Launcher] = {}
        self._repeated = Repeated()

    def launch(self, logits: Tensor, row_starts: Tensor | None, row_ends: Tensor | None, out: Tensor) -> None:
        given = (logits, row_starts, row_ends, out)
        self._repeated.run(*self.identified(*given), self._launch_anew, *given)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(*self.identified(*given))

    def _launch_anew(self, logits: Tensor, row_starts: Tensor | None, row_ends: Tensor | None, out: Tensor) -> None:
        rows, columns = logits.shape
        k = self.problem.k
        bounds = [0 if bound is None else bound.stride(0) for bound in (row_starts, row_ends)]
        variant = (out.get_device(), logits.stride(1), *bounds)
        candidates: Tensor | None = None
        with on_device_of(out):
            while True:
                block = self._block(rows, columns)
                parts = max(1, -(-columns // block))
                places = out
                if parts > 1:
                    places = torch.empty(rows, parts * k, dtype=torch.int32, device=out.device)
                self._launcher(block, candidates is not None)(
                    rows * parts,
                    (*variant, places.stride()),
                    logits,
                    row_starts,
                    row_ends,
                    candidates,
                    places,
                    columns,
                    k,
                    parts,
                    logits.stride(0),
                    logits.stride(1),
                    *bounds,
                    *places.stride(),
                )
                if parts == 1:
                    return
                candidates, columns = places, parts * k

    def workspace_bytes(self, num_tokens: int, max_kv_len: int) -> int:
        """Candidates. Smaller parts leave more of them, and so may fewer rows."""
        block = 8192 if self.problem.k <= 4096 else 16384
        held, columns = 0, max_kv_len
        while columns > block:
            columns = -(-columns // block) * self.problem.k
            held += 4 * num_tokens * columns
        return held

    def _block(self, rows: int, columns: int) -> int:
        """Elements of a program: twice as many as it leaves, and large parts where these still occupy the device."""
        for block in (4096, 8192):
            if columns <= block:
                return block
        large = rows * -(-columns // 16384) >= self.problem.device.num_sms
        return 16384 if large or self.problem.k > 4096 else 8192

    def _launcher(self, block: int, listed: bool) -> Launcher:
        made = self._launchers.get((block, listed))
        if made is None:
            static = {
                "HAS_STARTS": self.problem.row_starts,
                "HAS_ENDS": self.problem.row_ends,
                "LISTED": listed,
                "BLOCK": block,
            }
            made = self._launchers[block, listed] = Launcher(select_kernel, static, _WARPS[block], 2)
        return made
