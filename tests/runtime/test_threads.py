"""Threads, forks and changes of configuration while a kernel is being loaded or compiled."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.backends.cpp import build
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.load import LoadFailure, load_module
from kernelhub.dispatch.making import loading_registry
from kernelhub.errors import NotWarmed
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from tests.dispatch.backends import Ones, qkv, record, register
from tests.faults.scene import script

HERE = f"{__name__}"
SOON_S = 10.0  # a call that takes longer waits for what it has nothing to do with


class Slow(Ones):
    """Its load waits until it is let go."""

    begun: ClassVar[threading.Event]
    go: ClassVar[threading.Event]
    loads: ClassVar[int] = 0

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        type(self).loads += 1
        self.begun.set()
        assert self.go.wait(SOON_S)


class Polls(Ones):
    """As `Slow`, without a lock that a signal handler could find taken."""

    begun = go = False

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        Polls.begun = True
        while not Polls.go:
            time.sleep(0.01)


class CallsItself(Ones):
    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        kernelhub.attention(*qkv())


class CallsAnother(Ones):
    """Two of them, of two ops, each of which calls the other's op while it is loaded by its own thread."""

    met: ClassVar[threading.Barrier]

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        if not getattr(_nested, "now", False):
            _nested.now = True
            self.met.wait(SOON_S)
            (paged if problem.__class__.__name__ == "AttentionProblem" else dense)()


class Interrupted(Ones):
    """Its first load is ended from outside."""

    error: ClassVar[BaseException | None] = None

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        error, type(self).error = type(self).error, None
        if error is not None:
            raise error


_nested = threading.local()


def dense(**more: Any) -> torch.Tensor:
    result: torch.Tensor = kernelhub.attention(*qkv(), **more)
    return result


def paged() -> torch.Tensor:
    q, cache = torch.zeros(1, 2, 16), torch.zeros(1, 16, 2, 16)
    result: torch.Tensor = kernelhub.paged_attention(
        q, cache, cache, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    )
    return result


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread, and what it gave or raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def in_child(work: Callable[[], bool]) -> str:
    """How a forked child ended that does some work: ``"well"``, ``"badly"`` or ``"hangs"``."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    ends = time.monotonic() + SOON_S
    while time.monotonic() < ends:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return "well" if status == 0 else "badly"
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "hangs"


@pytest.fixture
def slow():
    """A kernel of `attention` whose load waits; the load goes on at the end at the latest, and its calls end here."""
    Slow.begun, Slow.go, Slow.loads = threading.Event(), threading.Event(), 0
    register("slow", record("slow.k", f"{HERE}:Slow"))
    before = set(threading.enumerate())
    yield Slow
    Slow.go.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(SOON_S)  # else a later test's report counts its call


class TestOneHangs:
    def test_a_compiler_that_hangs_stops_no_other_op(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("KERNELHUB_COMPILE_TIMEOUT_S", "1.5")
        started = tmp_path / "started"
        monkeypatch.setenv("CXX", str(script(tmp_path / "g++", f"touch {started}; sleep 60; exit 0")))
        build.library.cache_clear()
        kernelhub.reload()
        given = fp8_gemm_inputs(tokens=2, n=64, k=64)
        compiling, outcome = in_thread(lambda: kernelhub.fp8_gemm(**given))
        while not started.exists():
            time.sleep(0.01)
        begun = time.monotonic()
        with kernelhub.use(disable="cpp"):  # those of few queries need the same compiler
            dense()
            paged()
        kernelhub.configure(prefer="torch")
        dense()
        took = time.monotonic() - begun
        assert compiling.is_alive(), "the compiler was waited for"
        assert took < 1.4
        compiling.join(SOON_S)
        assert not compiling.is_alive(), "a compiler has a time limit, with all that it started"
        assert torch.isfinite(outcome[0]).all()
        build.library.cache_clear()

    def test_a_kernel_that_loads_stops_no_other_kernel_of_its_op(self, slow) -> None:
        loading, _ = in_thread(dense)
        assert slow.begun.wait(SOON_S)
        dense(backend="torch")
        dense(softcap=2.0, backend="torch")
        assert loading.is_alive()

    def test_the_same_problem_is_loaded_once(self, slow) -> None:
        threads = [in_thread(dense)[0] for _ in range(4)]
        assert slow.begun.wait(SOON_S)
        slow.go.set()
        for thread in threads:
            thread.join(SOON_S)
        assert slow.loads == 1


class TestWhatChangesMeanwhile:
    def test_a_newer_policy_is_not_lost(self, slow) -> None:
        loading, outcome = in_thread(dense)
        assert slow.begun.wait(SOON_S)
        kernelhub.configure(disable="slow")
        assert kernelhub.attention.explain(*qkv()).selected != "slow.k"
        dense()  # does not wait for the older choice
        slow.go.set()
        loading.join(SOON_S)
        assert (outcome[0] == 1).all(), "the call that was begun before is served as it was begun"
        assert not (dense() == 1).all()
        assert kernelhub.attention.prepare(*qkv()).kernel != "slow.k"
        assert sum(row.calls for row in kernelhub.report().rows if row.kernel == "slow.k") == 1

    def test_a_reload_goes_on_with_the_backends_that_are_registered(self, slow) -> None:
        loading, outcome = in_thread(dense)
        assert slow.begun.wait(SOON_S)
        kernelhub.reload()
        slow.go.set()
        loading.join(SOON_S)
        assert isinstance(outcome[0], torch.Tensor)

    def test_seal_is_not_waited_for_nor_passed(self, slow) -> None:
        dense(backend="torch")
        loading, _ = in_thread(dense)
        assert slow.begun.wait(SOON_S)
        with kernelhub.seal():
            dense(backend="torch")
            with pytest.raises(NotWarmed):
                dense(softcap=3.0, backend="torch")
        slow.go.set()
        loading.join(SOON_S)
        assert not loading.is_alive()


class TestLoadsThatCall:
    def test_one_that_calls_what_it_is_loaded_for_gives_way_to_the_next(self) -> None:
        register("itself", record("itself.k", f"{HERE}:CallsItself"))
        thread, outcome = in_thread(dense)
        thread.join(SOON_S)
        assert isinstance(outcome[0], torch.Tensor)
        reasons = " ".join(item.reason for item in kernelhub.report().fallbacks)
        assert "calls an op that selects the same kernel again" in reasons

    def test_two_that_call_each_other_from_two_threads_end(self) -> None:
        CallsAnother.met = threading.Barrier(2)
        register(
            "another",
            record("another.k", f"{HERE}:CallsAnother"),
            record("another.k", f"{HERE}:CallsAnother", op="paged_attention"),
        )
        threads = [in_thread(dense), in_thread(paged)]
        for thread, outcome in threads:
            thread.join(SOON_S)
            assert isinstance(outcome[0], torch.Tensor)

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=["interrupt", "memory"])
    def test_one_that_is_interrupted_leaves_nothing_half_made(self, error) -> None:
        Interrupted.error = error
        register("interrupted", record("interrupted.k", f"{HERE}:Interrupted"))
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                dense()
            assert (dense() == 1).all()
        else:
            dense()
            assert kernelhub.report().fallbacks[0].kernel == "interrupted.k"


class TestForks:
    @pytest.mark.fault("forked_while_a_kernel_loads")
    def test_a_child_forked_while_another_thread_loads_answers(self, slow) -> None:
        in_thread(dense)
        assert slow.begun.wait(SOON_S)

        def work() -> bool:
            Slow.go.set()
            other = dense(softcap=2.0, backend="torch")
            return bool(other.isfinite().all() and (dense() == 1).all() and paged().isfinite().all())

        assert in_child(work) == "well"

    def test_a_child_forked_under_the_lock_of_the_tables_answers(self) -> None:
        held, go = threading.Event(), threading.Event()

        def hold() -> None:
            with contextlib.ExitStack() as stack, HUB.lock, HUB.ledger._guard:
                for kernel in kernelhub.attention.kernels():
                    stack.enter_context(HUB.making.alone("attention", kernel, timeout_s=SOON_S))
                held.set()
                go.wait(SOON_S)

        in_thread(hold)
        assert held.wait(SOON_S)
        assert in_child(lambda: bool(dense().isfinite().all()) and bool(kernelhub.report().rows)) == "well"
        go.set()

    def test_a_child_forked_while_another_thread_imports_for_a_load_imports_anew(self, tmp_path, monkeypatch) -> None:
        source = (
            "import os, time\n"
            "from tests.dispatch.backends import Ones\n"
            f"open({str(tmp_path / 'begun')!r}, 'w').close()\n"
            f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
        )
        (tmp_path / "imported_slowly.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        register("imported", record("imported.k", "imported_slowly:Ones"))
        importing, _ = in_thread(dense)
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)

        def work() -> bool:
            (tmp_path / "go").touch()
            return bool((dense() == 1).all())

        assert in_child(work) == "well"
        importing.join(SOON_S)
        assert not importing.is_alive()
        sys.modules.pop("imported_slowly", None)


class TestFirstLoad:
    def test_a_backend_whose_import_calls_kernelhub_gets_an_error_at_once(self, tmp_path, monkeypatch) -> None:
        (tmp_path / "calls_early.py").write_text("import kernelhub\nkernelhub.explain('attention', device='H200')\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        begun = time.monotonic()
        HUB.restore()
        with loading_registry(), HUB.lock, pytest.raises(LoadFailure, match="still loading its ops and backends"):
            load_module("calls_early", SOON_S)
        assert time.monotonic() - begun < SOON_S / 2

    def test_a_signal_handler_that_calls_during_a_load_answers(self) -> None:
        answers: list[Any] = []
        Polls.begun, Polls.go = False, False
        register("polls", record("polls.k", f"{HERE}:Polls"))

        def handler(number: int, frame: Any) -> None:
            Polls.go = True
            answers.append(dense())

        def send() -> None:
            while not Polls.begun:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGUSR1)

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            in_thread(send)
            assert (dense() == 1).all()
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert (answers[0] == 1).all()
