"""Launches of `by_expert.py`: received tokens in the formats contiguous and masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

from kernelhub.backends.shared.by_expert import places_kernel, rows_kernel
from kernelhub.backends.shared.operands import on_device_of
from kernelhub.ops.comm.experts.formats import Arranged
from kernelhub.ops.comm.experts.problem import CONTIGUOUS, FEW, DispatchProblem

# Tokens that a program looks at in one step, and its warps. With 8 choices, on an H200 (2026-11-26, Triton 3.6.0, in
# graphs): of 128 tokens and 128 experts 512 take 2.9 us with 8 warps and 3.2 with 4, 1024 take 3.5; of 1024 tokens and
# 32 experts 5.0, 6.3 and 4.6; of 8192 tokens and 128 experts 30, 42 and 27. The tile of rows does not matter there: 128
# rows of 14 KB take 4.0 to 4.1 us with 4 to 16 KB at a time, 8192 rows 160 us.
_STEPS = {True: (512, 8), False: (1024, 8)}


class Arrange:
    """Rows by expert, of tokens that one kind of dispatch received.

    Args:
        problem: of the dispatch, in format contiguous or masked.
        words: of a row, of 32 bits.
        scales: of a row; 0 for none.
        block: words of a row that a program copies at a time.
        narrow: elements of a vector that holds the choices of a token, or its scales.
        warps: of a program that copies rows.
        launcher: of a kernel, its static arguments, warps and stages, what launches it: with the number of programs,
            what a compiled variant depends on, and the other arguments.
    """

    def __init__(
        self,
        problem: DispatchProblem,
        words: int,
        scales: int,
        block: int,
        narrow: int,
        warps: int,
        launcher: Callable[..., Any],
    ) -> None:
        self._local, self._top_k = problem.num_experts // problem.world_size, problem.top_k
        self._contiguous = problem.format == CONTIGUOUS
        alike = {"TOP_K": problem.top_k, "ENDS": self._contiguous}
        step, of_step = _STEPS[problem.capacity == FEW]
        lanes = int(triton.next_power_of_2(self._local))
        of_places = {"LOCAL": self._local, "BLOCK": step, "LANES": lanes}
        self._places = launcher(places_kernel, {**alike, **of_places}, of_step, 1)
        of_rows = {"X_WORDS": words, "SCALES": scales, "BLOCK": block, "NARROW": narrow}
        self._rows = launcher(rows_kernel, {**alike, **of_rows}, warps, 1)

    def compile(self, x: Tensor, ids: Tensor, floats: Tensor) -> None:
        """Compile and load what such operands need, where the launchers can without a launch."""
        device = x.device
        with on_device_of(x):
            self._places.prepare(1, device, ids, floats, ids, ids, ids, 1)
            self._rows.prepare(1, device, x, floats, ids, ids, ids, ids, x, floats, 1)

    def __call__(
        self, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor, ends: Tensor, exact: bool = False
    ) -> Arranged:
        """Launch on the current stream.

        Args:
            x: received tokens ``[R, H]``.
            scales: ``[R, S]``, or None.
            ids: int32 ``[R, top_k]``, local; negative for no expert of this rank.
            weights: float32 ``[R, top_k]``, 0 where the id is negative; they become those of the result.
            ends: int32 ``[E / W]`` zeros; they become the offsets of the result.
            exact: as many rows as there are, for which this waits for the device; otherwise as many as there can be.
        """
        if not exact:
            made = self.memory(x, scales, ids, weights, ends)
            self.into(made, x, scales, ids, ends)
            return made
        received = x.shape[0]
        slots, counts = ids.new_empty(ids.shape), ids.new_empty(self._local)
        with on_device_of(x):
            self._places(self._local, x.device, ids, weights, slots, counts, ends, received)
            room = received if self._contiguous else int(counts.max())  # of an expert
            form = (int(ends[-1]),) if self._contiguous else (self._local, room)
            made = self._made(form, x, scales, counts, ends, slots, weights)
            self._move(made, x, scales, ids, ends, room)
        return made

    def memory(self, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor, ends: Tensor) -> Arranged:
        """Room for as many rows as there can be; arguments as of a call. `into` fills it."""
        received = x.shape[0]
        form = (received * min(self._top_k, self._local),) if self._contiguous else (self._local, received)
        slots, counts = ids.new_empty(ids.shape), ids.new_empty(self._local)
        return self._made(form, x, scales, counts, ends, slots, weights)

    def into(self, made: Arranged, x: Tensor, scales: Tensor | None, ids: Tensor, ends: Tensor) -> None:
        """Launch on the current stream, into what `memory` gave."""
        received = x.shape[0]
        with on_device_of(x):
            self._places(self._local, x.device, ids, made.weights, made.slots, made.counts, ends, received)
            self._move(made, x, scales, ids, ends, received)

    def _made(
        self,
        form: tuple[int, ...],
        x: Tensor,
        scales: Tensor | None,
        counts: Tensor,
        ends: Tensor,
        slots: Tensor,
        weights: Tensor,
    ) -> Arranged:
        made_x = x.new_empty((*form, x.shape[1]))
        made_scales = None if scales is None else scales.new_empty((*form, scales.shape[1]))
        return Arranged(made_x, made_scales, counts, ends if self._contiguous else None, slots, weights)

    def _move(self, made: Arranged, x: Tensor, scales: Tensor | None, ids: Tensor, ends: Tensor, room: int) -> None:
        """Copy the rows, of which an expert has at most `room`."""
        received, weights = x.shape[0], made.weights
        of_scales = (weights, weights) if scales is None else (scales, made.scales)
        if received:
            places = made.slots, made.counts, ends
            self._rows(received, x.device, x, of_scales[0], ids, *places, made.x, of_scales[1], room)
