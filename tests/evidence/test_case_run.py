"""One verification that several processes share."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.evidence.apart import Ended
from kernelhub.evidence.call import OutOfMemory, Unavailable
from kernelhub.evidence.case_run import CaseRun, quick_run
from kernelhub.evidence.quarantine import kept_of
from kernelhub.evidence.results import Check
from kernelhub.ops.models.calls import need_of
from kernelhub.probes.device import facts
from kernelhub.runtime.progress import Heart
from kernelhub.warming.proof import Proof
from kernelhub.warming.wanted import Item

CPU = torch.device("cpu")


def kernel_of(op: str, name: str) -> Kernel:
    record = HUB.record(op).name
    return next(kernel for kernel in HUB.registry.candidates(record).kernels if kernel.name == name)


@pytest.fixture
def kernel() -> Kernel:
    return kernel_of("merge_attention_states", "torch.merge")


class Asked:
    """In place of a process: answers as it is told, and meets the other one at the first case."""

    def __init__(self, meeting: threading.Barrier | None = None, answer: Callable[[str], Any] | None = None) -> None:
        self.labels: list[str] = []
        self.meeting, self.answer = meeting, answer

    def check(self, subject: Any, case: Any, ahead: Any = ()) -> Any:
        self.labels.append(case.label)
        if self.meeting is not None and len(self.labels) == 1:
            self.meeting.wait(30)
        found = None if self.answer is None else self.answer(case.label)
        if isinstance(found, BaseException):
            raise found
        return found or Check(case.label, "ok", "", 0.5)


def together(run: CaseRun, *asked: Asked) -> list[Any]:
    """What each gets that asks at the same time as the others: a result, None or an error."""
    got: list[Any] = [None] * len(asked)

    def ask(place: int) -> None:
        try:
            got[place] = run.ask(asked[place])  # type: ignore[arg-type]
        except BaseException as error:
            got[place] = error

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return got


def stored(kernel: Kernel) -> Any:
    return kept_of(kernel, facts(CPU))


def test_each_case_is_checked_once_and_one_of_them_gets_the_result(kernel) -> None:
    meeting = threading.Barrier(2)
    one, other = Asked(meeting), Asked(meeting)
    run = quick_run(kernel, CPU)
    labels = [case.label for case in run.subject.cases.cases() if case.quick]
    got = together(run, one, other)
    assert sorted(one.labels + other.labels) == sorted(labels)
    assert one.labels, "each took its share"
    assert other.labels
    (result,) = (item for item in got if item is not None)
    assert [check.case for check in result.checks] == labels, "in the order of the cases"
    assert (result.status, result.left_out) == ("right", 0)
    assert stored(kernel).result.checks == result.checks
    assert run.ask(Asked()) is None, "there is nothing left"  # type: ignore[arg-type]


def test_a_case_that_ends_a_process_is_a_failure_and_no_further_one_begins(kernel) -> None:
    meeting = threading.Barrier(2)
    crashed = Asked(meeting, lambda label: Ended(Check(label, "crashed", "", math.inf, "SIGSEGV ended its process")))
    got = together(run := quick_run(kernel, CPU), crashed, Asked(meeting))
    (result,) = (item for item in got if item is not None)
    assert len(crashed.labels) == 1
    assert [check.code for check in result.failures] == ["crashed"]
    assert len(result.checks) + result.left_out == len([case for case in run.subject.cases.cases() if case.quick])
    assert stored(kernel).result.failures
    HUB.forget_evidence()
    decisions = kernelhub.explain("merge_attention_states", device="cpu").decisions
    assert next(item for item in decisions if item.kernel == kernel.name).rejections[0].code == "quarantined"


def test_an_interrupted_check_stores_nothing_and_earlier_results_stay(kernel) -> None:
    assert quick_run(kernel, CPU).ask(Asked()) is not None  # type: ignore[arg-type]
    before = stored(kernel)
    meeting = threading.Barrier(2)
    interrupted = Asked(meeting, lambda label: KeyboardInterrupt())
    got = together(quick_run(kernel, CPU), interrupted, Asked(meeting))
    assert sorted(map(type, got), key=str) == sorted([KeyboardInterrupt, type(None)], key=str)
    assert stored(kernel) == before


def test_what_cannot_be_loaded_has_no_result(kernel) -> None:
    result = quick_run(kernel, CPU).ask(Asked(answer=lambda label: Unavailable("no library")))  # type: ignore[arg-type]
    assert result is not None
    assert (result.checks, result.why_not) == ((), "no library")
    assert stored(kernel) is None


def test_a_case_without_room_is_counted(kernel) -> None:
    run = quick_run(kernel, CPU)
    first = next(run.subject.cases.cases()).label
    result = run.ask(Asked(answer=lambda label: OutOfMemory("") if label == first else None))  # type: ignore[arg-type]
    assert result is not None
    assert result.left_out == 1
    assert first not in [check.case for check in result.checks]


def test_cases_past_the_limit_are_counted(kernel) -> None:
    run = CaseRun(quick_run(kernel, CPU).subject, True, 0.0)
    meeting = threading.Barrier(2)
    got = together(run, Asked(meeting), Asked(meeting))
    (result,) = (item for item in got if item is not None)
    assert 1 <= len(result.checks) <= 2
    assert len(result.checks) + result.left_out == len([case for case in run.subject.cases.cases() if case.quick])


def test_children_of_a_warm_up_share_the_cases_of_one_kernel(monkeypatch) -> None:
    selection = kernelhub.explain("merge_attention_states", device="cpu")
    kernel = kernel_of("merge_attention_states", selection.selected)
    served: list[int] = []
    ask = CaseRun.ask

    def counted(run: CaseRun, child: Any) -> Any:
        result = ask(run, child)
        served.append(child._process.pid)  # of the child that checked its share
        return result

    monkeypatch.setattr(CaseRun, "ask", counted)
    item = Item(need_of("merge_attention_states", selection.problem), (2,))
    proof = Proof()
    with Heart(None, None) as heart:
        assert proof.settle([item], CPU, heart, jobs=2)
    assert len(set(served)) == 2, "two processes checked cases of the only kernel"
    alone = quick_run(kernel, CPU)
    assert len(stored(kernel).result.checks) == alone.left
    assert proof.verified == [("merge_attention_states", kernel.name)]
