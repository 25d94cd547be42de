"""Verification compiles what its cases need beforehand, in several threads."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.backends.torch.attention.blocked import Blocked
from kernelhub.dispatch.hub import HUB
from kernelhub.evidence import ahead, child, here
from kernelhub.evidence.apart import Child
from kernelhub.evidence.case_run import quick_run
from kernelhub.evidence.here import Here
from kernelhub.evidence.results import Check
from tests.dispatch.backends import record, register


class Compiled(Blocked):
    """Made as a kernel that compiles is: once for each problem in this process, with a wait."""

    made: ClassVar[dict[Any, str]] = {}  # problem -> the thread that compiled for it
    waits_s: ClassVar[float] = 0.0
    meeting: ClassVar[threading.Barrier | None] = None  # of the first ones
    met: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        if problem not in self.made:
            self.made[problem] = threading.current_thread().name
            if self.meeting is not None and next(self.met) < self.meeting.parties:
                self.meeting.wait(30)
            time.sleep(self.waits_s)


class Refused(Compiled):
    """Cannot be compiled with a softcap."""

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        if problem.softcap:
            raise RuntimeError("the compiler refuses a softcap")


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for lie in (Compiled, Refused):
        monkeypatch.setattr(lie, "made", {})
        monkeypatch.setattr(lie, "waits_s", 0.0)
        monkeypatch.setattr(lie, "meeting", None)
        monkeypatch.setattr(lie, "met", itertools.count())
    monkeypatch.setattr(ahead, "cores_here", lambda: 4)


def kernel_of(lie: type[Compiled], **more: Any) -> Any:
    register("ahead", record("ahead.k", f"{__name__}:{lie.__name__}", **({"compiles_when_made": True} | more)))
    return next(kernel for kernel in HUB.registry.candidates("attention").kernels if kernel.name == "ahead.k")


def run(kernel: Any) -> Any:
    asked_in = Here()
    try:
        return quick_run(kernel, torch.device("cpu")).ask(asked_in)
    finally:
        asked_in.close()


def test_threads_compile_at_once_and_the_cases_find_all_of_it(monkeypatch) -> None:
    kernel = kernel_of(Compiled)
    monkeypatch.setattr(Compiled, "meeting", threading.Barrier(2))  # one thread alone would wait in vain
    result = run(kernel)
    assert result.status == "right"
    assert len(Compiled.made) > 8
    assert {name.partition("_")[0] for name in Compiled.made.values()} == {"kernelhub compile"}, "no case compiled"


def test_what_cannot_be_compiled_is_the_failure_of_its_case() -> None:
    kernel = kernel_of(Refused)
    with pytest.raises(RuntimeError, match="refuses a softcap"):
        Refused(kernelhub.explain("attention", device="cpu", softcap=True).problem)
    result = run(kernel)
    assert "refuses a softcap" in result.why_not
    assert not any("softcap" in check.case for check in result.checks)


def test_cases_begin_when_the_time_of_compilers_has_passed(monkeypatch) -> None:
    kernel = kernel_of(Compiled)
    monkeypatch.setattr(Compiled, "waits_s", 0.05)
    monkeypatch.setattr(
        here, "compile_ahead", lambda subject, cases, limit_s: ahead.compile_ahead(subject, cases, 0.01)
    )
    assert run(kernel).status == "right"
    assert "kernelhub verify" in Compiled.made.values(), "a case compiled for itself"


@pytest.mark.parametrize("how", ["an undeclared kernel", "one processor"])
def test_nothing_is_compiled_ahead_of(how, monkeypatch) -> None:
    if how == "one processor":
        monkeypatch.setattr(ahead, "cores_here", lambda: 1)
    kernel = kernel_of(Compiled, compiles_when_made=how == "one processor")
    assert run(kernel).status == "right"
    assert set(Compiled.made.values()) == {"kernelhub verify"}


def test_a_case_that_does_not_fit_is_left_out_of_it(monkeypatch) -> None:
    kernel = kernel_of(Compiled)
    subject = quick_run(kernel, torch.device("cpu")).subject
    cases = [case for case in subject.cases.cases() if case.quick]

    def too_large(device: torch.device) -> Any:
        raise MemoryError("too large")

    whole = ahead.compile_ahead(subject, cases, 60.0)
    monkeypatch.setattr(Compiled, "made", {})
    assert ahead.compile_ahead(subject, [replace(cases[0], make=too_large), *cases], 60.0) == whole > 8


class Asked:
    """In place of a process: keeps what it is to compile ahead."""

    def __init__(self) -> None:
        self.ahead: list[list[str]] = []

    def check(self, subject: Any, case: Any, ahead: Any = ()) -> Check:
        self.ahead.append([each.label for each in ahead])
        return Check(case.label, "ok", "", 0.5)


@pytest.mark.parametrize("declared", [True, False])
def test_the_first_check_alone_names_all_cases(declared) -> None:
    kernel, asked = kernel_of(Compiled, compiles_when_made=declared), Asked()
    whole = quick_run(kernel, torch.device("cpu"))
    labels = [case.label for case in whole.subject.cases.cases() if case.quick]
    whole.ask(asked)  # type: ignore[arg-type]
    assert asked.ahead[0] == (labels if declared else [])
    assert len(asked.ahead) == len(labels)
    assert not any(asked.ahead[1:])


def test_a_child_compiles_what_its_order_names() -> None:
    kernel_of(Compiled)
    order = {"op": "attention", "kernel": "ahead.k", "device": "cpu"}
    subject, _ = child._asked(order | {"case": ""})
    assert subject is not None
    labels = [case.label for case in subject.cases.cases() if case.quick]
    answer = child._answer(order | {"case": labels[0], "ahead": labels, "ahead_s": 60.0})
    assert answer["check"]["code"] == "ok"
    assert len(Compiled.made) > 8
    assert {name.partition("_")[0] for name in Compiled.made.values()} == {"kernelhub compile"}


def test_orders_to_a_real_child_name_the_cases(monkeypatch) -> None:
    """The child has no kernel that this process registered, and says so: the line was understood."""
    kernel = kernel_of(Compiled)
    run = quick_run(kernel, torch.device("cpu"))
    with Child() as asked_in:
        result = run.ask(asked_in)
    assert result is not None
    assert "registered in the parent process" in result.why_not
