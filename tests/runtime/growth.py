"""A server that configures itself anew for a year does not grow, and its report stays right."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Callable

import pytest

import kernelhub
from kernelhub.dispatch import hub, ledger
from tests.dispatch.backends import qkv

NAMES = kernelhub.attention.kernels()


def call(**more) -> None:
    kernelhub.attention(*qkv(), **more)


def growth(act: Callable[[], object], before: int, times: int) -> float:
    """Bytes that remain of one act, once as many as `before` were done."""
    tracemalloc.start()  # from the beginning, so that what gives way counts too
    try:
        for _ in range(before):
            act()
        gc.collect()
        start = tracemalloc.get_traced_memory()[0]
        for _ in range(times):
            act()
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - start) / times
    finally:
        tracemalloc.stop()


def test_configure_leaves_nothing_behind() -> None:
    words = itertools.cycle(["torch", "triton", ()])

    def act() -> None:
        kernelhub.configure(prefer=next(words))
        call()

    assert growth(act, 4, 12) < 1000


def test_reload_leaves_nothing_behind() -> None:
    def act() -> None:
        kernelhub.reload()
        call()

    assert growth(act, 3, 5) < 10_000, "a reload that keeps what it replaces keeps 29 KB"


@pytest.mark.parametrize("how", ["backend", "use"])
def test_words_that_are_always_new_give_way_to_newer_ones(how, monkeypatch) -> None:
    monkeypatch.setattr(hub, "_KEPT", 16)
    monkeypatch.setattr(ledger, "_REASONS", 8)
    words = itertools.permutations(NAMES, 4)

    def act() -> None:
        names = ("torch.sdpa", *next(words))
        if how == "backend":
            call(backend=names)
        else:
            with kernelhub.use(prefer=names):
                call()

    assert growth(act, 25, 12) < 1500
    assert sum(row.calls for row in kernelhub.report().rows) == 37


def test_the_report_counts_calls_of_selections_that_are_gone_and_of_plans_that_are_kept() -> None:
    plan = kernelhub.attention.prepare(*qkv())
    for _ in range(5):
        kernelhub.configure(prefer="torch")
        call()
        kernelhub.configure()
        call()
        plan.run(*qkv())
    rows = kernelhub.report().rows
    assert sum(row.calls for row in rows) == 15
    assert len({(row.kernel, row.source, row.because) for row in rows}) == len(rows) <= 2
    assert len(kernelhub.dispatch.hub.HUB.selections()) == 1
