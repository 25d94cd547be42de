"""The last step of direct calls, per thread: the layers of an engine step share its metadata.

A single thread reads one attribute. Threads that alternate on one kernel with separate block tables find their own step
again; with one shared step each turn would begin a new one. Each thread keeps at most one step, until it ends.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Generic, TypeVar

from kernelhub.ops.attention.adapter import DenseStep, PagedStep

StepT = TypeVar("StepT", DenseStep, PagedStep)


class LastSteps(Generic[StepT]):
    """The steps of one bound kernel.

    Attributes:
        last: the step of whichever thread called last, or None; it may not be of the metadata that is given now.
    """

    __slots__ = ("__weakref__", "_own", "last")

    def __init__(self) -> None:
        self.last: StepT | None = None
        self._own: threading.local | None = None  # made when it is needed: it takes some microseconds

    def find(self, *metadata: Any) -> StepT | None:
        """This thread's step, if it is of this metadata; see the steps' `is_of`."""
        kept: _Kept | None = getattr(self._own, "kept", None)  # None has none either
        if kept is None or not kept.step.is_of(*metadata):
            return None
        step: StepT = kept.step
        self.last = step
        return step

    def keep(self, step: StepT) -> None:
        """Take a step for this thread's, and for later calls with the same tensors, whatever is in them by then."""
        step.outlive()
        self.last = step
        if isinstance(step, DenseStep) and step.cu_seqlens_q is None:  # without metadata it is every thread's
            return
        if self._own is None:
            self._own = threading.local()
        self._own.kept = _Kept(step, self)


class _Kept:
    """A thread's step; it goes with the thread."""

    __slots__ = ("_steps", "step")

    def __init__(self, step: Any, steps: LastSteps[Any]) -> None:
        self.step, self._steps = step, weakref.ref(steps)

    def __del__(self) -> None:
        steps = self._steps()
        if steps is not None and steps.last is self.step:
            steps.last = None
