"""Kernels of `attention` and `paged_attention` that can take other sizes, as plugins of tests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kernelhub.backends.torch.attention.packed import Packed, PackedPaged
from kernelhub.dispatch.configuration import Configurable, Configuration, look_up
from tests.dispatch.backends import record, register


class Sized(Packed, Configurable):
    """Right and slow, unless it is told to wait less; told to lie, it does."""

    ran: ClassVar[list[Any]] = []
    offered: ClassVar[list[Configuration]] = [{"wait_s": 0.0}, {"wait_s": 0.0, "lies": True}, {"wait_s": 0.005}]

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        self._measured: Mapping[int, Configuration] = {}

    def configurations(self, num_tokens: int, stage: int, best: Configuration | None) -> Sequence[Configuration]:
        return self.offered if stage == 0 else ()

    def configure(self, measured: Mapping[int, Configuration]) -> None:
        for configuration in measured.values():
            float(configuration["wait_s"])
        self._measured = measured

    def launch(self, q: Any, k: Any, v: Any, step: Any, values: Any, out: Any, lse: Any) -> None:
        found = look_up(self._measured, q.shape[0])
        type(self).ran.append(found)
        sizes = found.configuration or {"wait_s": 0.003}
        super().launch(q, k, v, step, values, out, lse)
        if sizes.get("lies"):
            out.zero_()
        until = time.perf_counter() + sizes["wait_s"]
        while time.perf_counter() < until:
            pass


class SizedPaged(PackedPaged, Configurable):
    """The same of a paged cache, but for the time it takes."""

    def configurations(self, num_tokens: int, stage: int, best: Configuration | None) -> Sequence[Configuration]:
        return ()

    def configure(self, measured: Mapping[int, Configuration]) -> None:
        self.measured = measured


def attention(*constraints: Any) -> None:
    """Register `sized.k` for `attention`."""
    register("sized", record("sized.k", f"{__name__}:Sized", *constraints, configurable=True))


def paged_attention() -> None:
    """Register `sized.k` for `paged_attention`."""
    register("sized", record("sized.k", f"{__name__}:SizedPaged", op="paged_attention", configurable=True))
