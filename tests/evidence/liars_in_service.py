"""Kernels of `attention` that are right in every check of `verify`, and lie where it does not look."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from tests.dispatch.backends import record, register
from tests.evidence.liars import Lie


class BeyondAThousandTokens(Lie):
    def spoil(self, q, k, out, lse):
        if q.shape[-3] > 1000:
            out[..., 1000:, :, :] *= 1.5


class FromBatchFiveOn(Lie):
    def spoil(self, q, k, out, lse):
        if q.shape[0] >= 5:
            out[4:] *= 1.5


class EveryHundredthCall(Lie):
    def __init__(self, problem):
        super().__init__(problem)
        self.count = itertools.count(1).__next__

    def spoil(self, q, k, out, lse):
        if not self.count() % 100:
            out *= 1.5


class AfterTheFirstCalls(EveryHundredthCall):
    def spoil(self, q, k, out, lse):
        if self.count() > 40:
            out *= 1.5


class BelowTheNormalRange(Lie):
    """Takes numbers below the normal range for zeros."""

    def spoil(self, q, k, out, lse):
        out[out.abs() < torch.finfo(out.dtype).tiny] = 0.0


class ByAnotherThread(Lie):
    """Leaves the launch before its result is written."""

    done = threading.Event()

    def launch(self, q, k, v, step, values, out, lse):
        made = torch.empty_like(out)
        super().launch(q, k, v, step, values, made, lse)
        out.zero_()

        def write():
            self.done.wait(20)
            out.copy_(made)

        threading.Thread(target=write, daemon=True).start()


class SpoilsItLate(Lie):
    """Writes its result again when the launch has returned."""

    spoils: ClassVar[Callable[[], Any]]

    def spoil(self, q, k, out, lse):
        def spoils():
            thread = threading.Thread(target=out.zero_)
            thread.start()
            thread.join()

        type(self).spoils = spoils


class ChangesItsInput(Lie):
    """Reads what it has spoiled, so that its result fits what stands in the input afterwards."""

    def launch(self, q, k, v, step, values, out, lse):
        v.mul_(2.0)
        super().launch(q, k, v, step, values, out, lse)


def attention(lie: type[Lie]) -> None:
    """Register a kernel of `attention`."""
    register("liar", record("liar.k", f"{__name__}:{lie.__name__}"))
