"""Adapters of Gluon kernels on CPU tensors: their launches run in the emulator."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from triton.runtime.interpreter import InterpretedFunction

import kernelhub
import kernelhub.testing
from kernelhub.backends.gluon import kernels as records
from kernelhub.backends.gluon.launch import Launcher
from kernelhub.backends.gluon.requirements import MACHINE
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Backend, Band
from kernelhub.errors import ConfigurationError
from kernelhub.probes.device import simulated
from tests.dispatch.backends import EVERYWHERE
from tests.gluon.emulate import run

FEW_SMS = 3  # so few that programs go over several tiles
_H200 = dataclasses.replace(simulated("H200"), num_sms=FEW_SMS)


@contextlib.contextmanager
def emulated(seed: int = 0) -> Iterator[None]:
    """Within the block launches of Gluon kernels run in the emulator, each with another interleaving."""
    launch, count = Launcher.__call__, 0

    def run_here(self: Launcher, grid: Any, _variant: Any, *arguments: Any) -> None:
        nonlocal count
        if isinstance(self.kernel, InterpretedFunction):  # one of Triton, beside those of Gluon
            self.kernel[grid if isinstance(grid, tuple) else (grid,)](*arguments, **self.static)
            return
        run(self.kernel, grid, arguments, self.static, seed + count)
        count += 1

    Launcher.__call__ = run_here  # type: ignore[method-assign]
    try:
        yield
    finally:
        Launcher.__call__ = launch  # type: ignore[method-assign]


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Backend `emulated`: the records of gluon without what they ask of the machine."""
    made = [
        dataclasses.replace(
            kernel,
            name=kernel.name.replace("gluon.", "emulated."),
            target=f"{__name__}:made_{at}",
            band=Band.PLUGIN,
            standings=EVERYWHERE,
            constraints=(anything("device"), *(item for item in kernel.constraints if item not in MACHINE)),
        )
        for at, kernel in enumerate(records.KERNELS)
    ]
    module = SimpleNamespace(__name__="emulated", BACKEND=Backend("emulated", "Gluon in numpy"), KERNELS=made)
    handle = kernelhub.register_backend(module)
    try:
        yield
    finally:
        handle.remove()


kernelhub.testing.repair_interpreter()


class Emulated:
    """Before a contract in the bases of a test class: its kernel, `emulated.NAME`, runs here.

    Attributes:
        labels: of the cases to run; of all if there are none.
    """

    device = "cpu"
    labels: tuple[str, ...] = ()
    _accepted: list[Any]

    @classmethod
    def accepted_cases(cls) -> list[Any]:
        if "_accepted" not in cls.__dict__:
            try:
                found = super().accepted_cases()  # type: ignore[misc]
            except ConfigurationError:  # collected: only within a test the backend is registered
                with on_the_cpu():
                    found = super().accepted_cases()  # type: ignore[misc]
            cls._accepted = [case for case in found if not cls.labels or case.label in cls.labels]
            assert len(cls._accepted) == (len(cls.labels) or len(found))
        return cls._accepted

    @pytest.fixture(autouse=True)
    def here(self, clean_hub: Any) -> Iterator[None]:
        with on_the_cpu(), emulated():
            yield


def _make(target: str, problem: Any) -> Any:
    """The adapter, made for an H200: the problem's own device is a CPU."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(dataclasses.replace(problem, device=_H200))


for _at, _kernel in enumerate(records.KERNELS):
    globals()[f"made_{_at}"] = functools.partial(_make, _kernel.target)
