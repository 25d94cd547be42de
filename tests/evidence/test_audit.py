"""Audits of real calls: kernels that pass `verify` and lie in service are found, right ones never are."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import kernelhub
from kernelhub.cli.main import main
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import CacheError, ConfigurationError
from kernelhub.evidence.audit import findings, replay, schedule, watching
from kernelhub.evidence.audit.comparing import Comparison
from kernelhub.evidence.audit.launches import METHODS, READERS, Rows
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.results import CODES
from kernelhub.runtime.caches import cases
from tests.evidence import liars
from tests.evidence import liars_in_service as service

SHARE = 1 / 10


@pytest.fixture(autouse=True)
def told(caplog, monkeypatch):
    """Findings are told anew in each test, and calls are drawn alike."""
    findings.forget_reported()
    monkeypatch.setattr(schedule.Schedule.__init__, "__defaults__", (1,))
    caplog.set_level(logging.INFO, "kernelhub.audit")
    return caplog


def operands(tokens: int = 4, batch: int = 1):
    torch.manual_seed(tokens)
    return torch.randn(batch, tokens, 2, 16), torch.randn(batch, tokens, 1, 16), torch.randn(batch, tokens, 1, 16)


def the_audit(kernel: str = "liar.k"):
    return next(item for item in kernelhub.report().audits if item.kernel == kernel)


def decision(name: str = "liar.k"):
    return next(item for item in kernelhub.attention.explain(*operands()).decisions if item.kernel == name)


def ordinary(number: int):
    return operands()


@pytest.mark.parametrize(
    ("lie", "call", "most_calls"),
    [
        (service.BeyondAThousandTokens, lambda number: operands(4 if number < 20 else 1100), 21),
        (service.FromBatchFiveOn, lambda number: operands(4, batch=1 + number % 8), 8),
        (service.EveryHundredthCall, ordinary, 5_000),
        (service.AfterTheFirstCalls, ordinary, 100),
        (service.BelowTheNormalRange, lambda number: [*operands()[:2], operands()[2] * 1e-39], 1),
        (service.ByAnotherThread, ordinary, 1),
        (service.ChangesItsInput, ordinary, 1),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_kernel_that_is_wrong_where_verification_does_not_look_is_found_in_time(lie, call, most_calls, told) -> None:
    service.ByAnotherThread.done.clear()
    service.attention(lie)
    kernelhub.configure(audit=SHARE, attention="liar.k")
    for number in range(most_calls):
        kernelhub.attention(*call(number))
        if the_audit().wrong:
            break
    service.ByAnotherThread.done.set()
    audit = the_audit()
    assert audit.wrong == 1
    assert audit.figures
    (record,) = [item for item in told.records if item.levelno == logging.ERROR]
    assert "attention liar.k: wrong in service" in record.message
    assert audit.figures in record.message
    assert "kernelhub replay " in record.message
    assert kernelhub.health().wrong_in_service == (f"attention liar.k: 1 of {audit.checked} calls",)
    assert kernelhub.health().ok


def test_a_result_that_is_right_and_spoiled_before_the_call_returns_is_found(monkeypatch) -> None:
    """By another thread of the kernel, while the call is compared; after it nobody can tell it from the caller."""
    service.attention(service.SpoilsItLate)
    kernelhub.configure(audit=1.0, attention="liar.k")
    really = watching.compared

    def compared(*given, **named):
        outcome = really(*given, **named)
        service.SpoilsItLate.spoils()
        return outcome

    monkeypatch.setattr(watching, "compared", compared)
    kernelhub.attention(*operands())
    assert (the_audit().wrong, the_audit().figures) == (1, "out was written again after the launch had returned")


def calls_of(op: str, most: int):
    """The first quick cases of an op, and those of the features that follow."""
    quick = [case for case in CASES[op].cases() if case.quick]
    return quick[:: max(1, len(quick) // most)][:most]


# Their references need the tokens of all ranks.
OF_ALL_RANKS = {"moe_dispatch", "moe_combine", "expert_parallel_moe"}
AUDITED = sorted(set(CASES) - OF_ALL_RANKS)


@pytest.mark.parametrize("op", sorted(OF_ALL_RANKS))
def test_a_collective_of_experts_runs_and_is_counted_as_skipped(op, told) -> None:
    kernelhub.configure(audit=1.0)
    for case in calls_of(op, 3):
        HUB.function(op)(**case.make(torch.device("cpu")))
    audits = [item for item in kernelhub.report().audits if item.op == op]
    assert audits
    assert all(dict(item.skipped) and set(dict(item.skipped)) == {"collective"} for item in audits)
    assert not any(item.checked or item.wrong for item in audits)
    assert not [item for item in told.records if item.levelno >= logging.WARNING]


@pytest.mark.parametrize("op", AUDITED)
def test_a_right_kernel_is_never_accused(op, told) -> None:
    """Also in place, into caches, with unused slots that hold anything, and under settings meant for a model."""
    kernelhub.configure(audit=1.0)
    function = HUB.function(op)
    settings = (torch.get_default_dtype(), torch.is_autocast_enabled("cpu"))
    made = 0
    for number, case in enumerate(calls_of(op, 7)):
        arguments = case.make(torch.device("cpu"))
        torch.set_default_dtype(torch.bfloat16 if number % 2 else torch.float32)
        try:
            with torch.autocast("cpu", enabled=number % 3 == 1), torch.inference_mode(number % 2 == 0):
                function(**arguments)
                placed = CASES[op].in_place(arguments)
                if placed is not None:
                    function(**placed[0] | placed[1])
        finally:
            torch.set_default_dtype(settings[0])
        made += 1 + (placed is not None)
    audits = [item for item in kernelhub.report().audits if item.op == op]
    assert sum(item.checked for item in audits) >= made // 2, "too few calls were compared"
    assert [str(item) for item in audits if item.wrong or item.disputed or item.skipped] == []
    assert not [item for item in told.records if item.levelno >= logging.WARNING]


def test_what_an_engine_keeps_in_unused_slots_says_nothing_about_a_kernel() -> None:
    kernelhub.configure(audit=1.0)
    q = torch.randn(2, 4, 16)
    k_cache, v_cache = torch.full((2, 5, 8, 2, 16), torch.nan)
    table = torch.tensor([[3, 1, -7], [0, 99, 2**31 - 1]], dtype=torch.int32)
    lens = torch.tensor([11, 3], dtype=torch.int32)
    for page, used in ((3, 8), (1, 3), (0, 3)):
        k_cache[page, :used], v_cache[page, :used] = torch.randn(2, used, 2, 16)
    assert kernelhub.paged_attention(q, k_cache, v_cache, table, lens).isfinite().all()
    (audit,) = kernelhub.report().audits
    assert (audit.checked, audit.wrong, audit.skipped) == (1, 0, {})


def test_rows_that_hold_no_numbers_say_nothing_about_a_kernel() -> None:
    kernelhub.configure(audit=1.0)
    q, k, v = operands()
    q[:, 1] = torch.nan
    kernelhub.attention(q, k, v)
    (audit,) = kernelhub.report().audits
    assert (audit.wrong, audit.skipped) == (0, {"no_numbers": 1})


def test_calls_of_nothing_are_neither_launched_nor_audited() -> None:
    kernelhub.configure(audit=1.0)
    assert kernelhub.attention(*operands(batch=0)).shape == (0, 4, 2, 16)
    assert kernelhub.report().audits == ()


def paged(tokens: int = 3):
    torch.manual_seed(tokens)
    k_cache, v_cache = torch.randn(2, 5, 8, 2, 16)
    return torch.randn(2, 4, 16), k_cache, v_cache


def test_calls_by_a_plan_and_by_its_steps_are_audited_too() -> None:
    kernelhub.configure(audit=1.0)
    q, k_cache, v_cache = paged()
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    lens = torch.tensor([11, 3], dtype=torch.int32)
    plan = kernelhub.paged_attention.prepare(q, k_cache, v_cache, table, lens)
    plan.run(q, k_cache, v_cache, table, lens)
    step = plan.begin(table, lens)
    step.run(q, k_cache, v_cache)
    step.run(q, k_cache, v_cache, out=torch.empty_like(q))
    assert the_audit(plan.kernel).checked == 3


def test_calls_of_several_threads_are_audited_and_none_is_accused() -> None:
    kernelhub.configure(audit=1.0)
    errors = []

    def serve(number):
        try:
            for _ in range(10):
                kernelhub.attention(*operands(4 + number), causal=True)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sum(item.checked for item in kernelhub.report().audits) == 40
    assert [str(item) for item in kernelhub.report().audits if item.wrong or item.skipped] == []


def test_calls_of_a_compiled_graph_are_audited_where_they_run() -> None:
    kernelhub.configure(audit=1.0)
    given = operands()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(q, k, v):
        return kernelhub.attention(q, k, v, causal=True) + 1

    for _ in range(2):
        layer(*given)
    assert [(item.checked, item.wrong, item.skipped) for item in kernelhub.report().audits] == [(2, 0, {})]


def test_off_is_off_a_call_runs_what_it_always_ran() -> None:
    q, k, v = operands()
    plan = kernelhub.attention.prepare(q, k, v)
    bare = set(vars(plan.adapter))
    kernelhub.configure(audit=1e-4)
    watched = set(vars(kernelhub.attention.prepare(q, k, v).adapter)) - bare
    assert watched >= {"launch"}
    kernelhub.configure()
    kernelhub.attention(q, k, v)
    assert set(vars(kernelhub.attention.prepare(q, k, v).adapter)) == bare
    assert kernelhub.report().audits == ()


def test_nothing_of_audits_is_imported_while_they_are_off() -> None:
    code = (
        "import sys, torch, kernelhub; q = torch.randn(1, 4, 2, 16); kernelhub.attention(q, q, q); "
        "print([name for name in sys.modules if name.startswith('kernelhub.evidence.audit')])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_a_call_over_the_budget_is_counted_and_not_compared(monkeypatch) -> None:
    monkeypatch.setenv("KERNELHUB_AUDIT", "1")
    monkeypatch.setenv("KERNELHUB_AUDIT_BYTES", "2000000")
    kernelhub.reload()
    kernelhub.attention(*operands(40))
    kernelhub.attention(*operands(4000))
    (audit,) = kernelhub.report().audits
    assert (audit.checked, audit.skipped) == (1, {"bytes": 1})
    assert "skipped 1 (bytes)" in str(kernelhub.report())


def test_after_seal_audits_go_on_and_decide_nothing_new(told) -> None:
    liars.attention(liars.ThirtyPercentOff)
    kernelhub.configure(audit=1.0, audit_action="quarantine", attention="liar.k")
    plan = kernelhub.attention.prepare(*operands())
    with kernelhub.seal():
        for _ in range(3):
            plan.run(*operands())
        audit = the_audit()
        assert (audit.checked, audit.wrong, audit.skipped) == (3, 3, {})
        assert plan.kernel == "liar.k"
        assert kernelhub.report().after_seal == ()
    (record,) = [item for item in told.records if item.levelno == logging.ERROR]
    assert "it is quarantined for the next process, not immediately: kernelhub is sealed" in record.message


def test_where_ranks_agreed_one_alone_does_not_choose_anew(told, monkeypatch) -> None:
    liars.attention(liars.ThirtyPercentOff)
    kernelhub.configure(audit=1.0, audit_action="quarantine")
    plan = kernelhub.attention.prepare(*operands())
    monkeypatch.setattr(HUB, "agreed", {"attention": object()})
    generation = HUB.generation
    plan.run(*operands())
    assert the_audit().wrong == 1
    assert HUB.generation == generation, "every choice stands"
    assert "not immediately: ranks agreed on what runs" in told.text


def test_a_wrong_kernel_is_chosen_no_more_in_the_next_process_and_verification_does_not_take_that_back() -> None:
    service.attention(service.BeyondAThousandTokens)
    kernelhub.configure(audit=1.0)
    kernelhub.attention(*operands(1100), backend="liar.k")
    assert decision().accepted, "in this process it goes on"
    HUB.forget_evidence()  # as the next process reads it
    rejected = decision()
    assert (rejected.accepted, rejected.code) == (False, "quarantined")
    assert CODES["wrong_in_service"] in rejected.reason
    assert "kernelhub replay" in rejected.remedy
    kernelhub.verify("attention", backend="liar", device="cpu", quick=True)
    assert decision().code == "quarantined"


def test_a_wrong_kernel_is_chosen_no_more_at_once_if_that_is_requested(told) -> None:
    liars.attention(liars.ThirtyPercentOff)
    kernelhub.configure(audit=1.0, audit_action="quarantine")
    q, k, v = operands()
    want = kernelhub.attention.reference(q, k, v)
    assert kernelhub.attention.explain(q, k, v).selected == "liar.k"
    assert not torch.allclose(kernelhub.attention(q, k, v), want, atol=1e-4)
    torch.testing.assert_close(kernelhub.attention(q, k, v), want, rtol=0, atol=1e-4)
    assert decision().code == "quarantined"
    assert "an existing plan runs it until it is prepared again" in told.text


def test_a_call_that_raises_raises_as_before_and_is_not_counted_as_compared() -> None:
    liars.attention(liars.Raises)
    kernelhub.configure(audit=1.0, attention="liar.k")
    with pytest.raises(RuntimeError, match="multiples of 128"):
        kernelhub.attention(*operands())
    assert kernelhub.report().audits == ()
    liars.Raises.mended = True
    try:
        kernelhub.attention(*operands())
        assert the_audit().checked == 1, "later calls are audited"
    finally:
        liars.Raises.mended = False


def spoiling(launch, op):
    """A method of an adapter that writes its results otherwise in one place."""

    def launched(self, *given):
        returned = launch(self, *given)
        for result in READERS[op](self.problem, given).results.values() or (returned,):
            place = result.source if isinstance(result, Rows) else result
            if isinstance(result, Rows) and not bool((result.index >= 0).any()):
                continue
            at = int(result.index[result.index >= 0][0]) if isinstance(result, Rows) else 0
            first = place[at].flatten()[:1].float() if place.ndim else place.float()
            spoiled = torch.where(first.abs() < 1, 3.0, -2.0 * first).nan_to_num(nan=3.0, posinf=3.0, neginf=3.0)
            row = place[at]
            while row.ndim:
                row = row[0]
            row.copy_(spoiled.view(()).to(place.dtype))
        return returned

    return launched


@pytest.mark.parametrize("op", AUDITED)
def test_one_wrong_element_is_found_in_any_op(op) -> None:
    function = HUB.function(op)
    for one in calls_of(op, 3):
        arguments = one.make(torch.device("cpu"))
        if "x" in arguments and not arguments["x"].numel():
            continue  # no element can be wrong
        kernelhub.configure(audit=1.0)
        kind = type(function.prepare(**arguments).adapter)
        with pytest.MonkeyPatch.context() as patch:
            for name in METHODS:
                if hasattr(kind, name):
                    patch.setattr(kind, name, spoiling(getattr(kind, name), op))
            kernelhub.configure(audit=1.0)
            function(**arguments)
    audits = kernelhub.report().audits
    assert [str(item) for item in audits if item.wrong != item.checked or item.skipped] == []
    assert audits


def test_verifying_is_no_service() -> None:
    liars.attention(liars.ThirtyPercentOff)
    kernelhub.configure(audit=1.0)
    kernelhub.verify("attention", backend="liar", device="cpu", quick=True)
    assert kernelhub.report().audits == ()


@pytest.fixture
def case() -> Path:
    """The file of a wrong call."""
    liars.attention(liars.ThirtyPercentOff)
    kernelhub.configure(audit=1.0, attention="liar.k")
    kernelhub.attention(*operands(), causal=True, softcap=30.0)
    kernelhub.configure()
    (path,) = (Path(os.environ["KERNELHUB_CACHE_DIR"]) / "audit").iterdir()
    return path


class TestReplay:
    def test_runs_the_call_again_and_prints_the_figures(self, case, capsys) -> None:
        assert main(["replay", str(case), "--device", "cpu"]) == 1
        told = capsys.readouterr().out
        assert "liar.k on" in told
        assert "wrong (wrong_numbers)" in told
        assert "results stored in the file:" in told

    def test_without_a_file_lists_those_that_are_kept(self, case, capsys) -> None:
        assert main(["replay"]) == 0
        assert capsys.readouterr().out.split() == [str(case)]
        case.unlink()
        assert main(["replay"]) == 0
        assert "no calls are stored" in capsys.readouterr().out

    def test_of_another_kernel_says_that_it_is_right(self, case, capsys) -> None:
        assert main(["replay", str(case), "--backend", "torch.blocked", "--device", "cpu", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["kernel"], told["kept_of"], told["ok"]) == ("torch.blocked", "liar.k", True)
        assert told["kept"]["ratio"] > 1

    def test_of_the_kernel_once_it_is_fixed_takes_it_out_of_quarantine(self, case, capsys) -> None:
        HUB.forget_evidence()
        assert decision().code == "quarantined"
        with liars.mended(liars.ThirtyPercentOff):
            assert main(["replay", str(case), "--device", "cpu"]) == 0
        assert "no longer quarantines it" in capsys.readouterr().out
        assert decision().accepted

    def test_is_for_this_user_alone(self, case) -> None:
        assert case.stat().st_mode & 0o777 == 0o600
        assert case.parent.stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda path: path.chmod(0o666), "can be written by other users.*chmod 600"),
            (lambda path: path.write_bytes(path.read_bytes()[:-1]), "its operands were changed"),
            (lambda path: path.write_bytes(b"\x80\x04cos\nsystem\n"), "not a case of an audit"),
            (lambda path: path.write_bytes(b"kernelhub case 1\n" + b"[" * 100_000 + b"\n"), "not JSON"),
            (lambda path: path.write_bytes(b'kernelhub case 1\n{"op": "os.system"}\n'), "is missing"),
            (lambda path: path.unlink(), "No such file or directory; `kernelhub replay` lists the files"),
        ],
        ids=["open to others", "cut off", "pickle", "deep", "empty", "gone"],
    )
    def test_of_what_an_audit_did_not_write_is_an_error(self, case, spoil, message, capsys) -> None:
        spoil(case)
        with pytest.raises(CacheError, match=message):
            replay.replay(case)
        assert main(["replay", str(case), "--device", "cpu"]) == 2

    def test_files_are_bounded_in_number_and_bytes(self, case, monkeypatch) -> None:
        monkeypatch.setattr(cases, "MOST_CASES", 3)
        for number in range(5):
            path, why_not = cases.write_case(f"c{number}", {}, [b"12"], 2)
            assert path is not None, why_not
        there = sorted(file.name for file in case.parent.iterdir())
        assert [name[:2] for name in there] == ["c2", "c3", "c4"]
        monkeypatch.setattr(cases, "MOST_BYTES", 10)
        assert cases.write_case("large", {}, [b"1" * 11], 11)[0] is None


@pytest.mark.parametrize("op", AUDITED)
def test_a_case_of_any_op_can_be_kept_and_run_again(op, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(watching, "compared", lambda *_, **__: Comparison("wrong", "wrong_numbers", 2.0, "by order"))
    monkeypatch.setattr(watching, "found_wrong", lambda found, settings: seen.append(found))
    kernelhub.configure(audit=1.0)
    for one in calls_of(op, 4):
        if not seen:  # the first may be of no tokens
            HUB.function(op)(**one.make(torch.device("cpu")))
    path, why_not = replay.keep_case(seen[0])
    assert path is not None, why_not
    again = replay.replay(path)
    assert again.ok, str(again)
    assert again.kept_ratio <= 1


class TestAnotherKernel:
    """One that is verified here is asked before the reference, and accuses nobody."""

    def verify(self, kernel: str) -> None:
        assert kernelhub.verify("attention", backend=kernel, device="cpu", quick=True, budget_s=0.1).ok

    def test_that_agrees_spares_the_reference(self, monkeypatch) -> None:
        liars.attention(liars.Truth)
        self.verify("torch.blocked")
        kernelhub.configure(audit=1.0, attention="liar.k")
        plan = kernelhub.attention.prepare(*operands())
        before = {row.kernel: row.calls for row in kernelhub.report().rows}

        def reference(self):
            raise AssertionError("the reference is asked")

        monkeypatch.setattr(type(CASES["attention"]), "reference", property(reference))
        plan.run(*operands())
        assert (the_audit().checked, the_audit().wrong, the_audit().skipped) == (1, 0, {})
        after = {row.kernel: row.calls for row in kernelhub.report().rows}
        assert after == before | {"liar.k": 1}, "the report tells what served"

    def test_that_is_wrong_itself_is_overruled_by_the_reference(self) -> None:
        with liars.mended(liars.ThirtyPercentOff):
            liars.attention(liars.ThirtyPercentOff)
            self.verify("liar.k")
        kernelhub.configure(audit=1.0, attention="torch.blocked")
        kernelhub.attention(*operands())
        audit = the_audit("torch.blocked")
        assert (audit.checked, audit.wrong, audit.disputed) == (1, 0, 0)

    def test_that_differs_where_the_reference_is_too_large_makes_a_dispute_and_no_finding(
        self, told, monkeypatch
    ) -> None:
        with liars.mended(liars.ThirtyPercentOff):
            liars.attention(liars.ThirtyPercentOff)
            self.verify("liar.k")
        monkeypatch.setenv("KERNELHUB_AUDIT_BYTES", "4000000")
        kernelhub.reload()
        kernelhub.configure(audit=1.0, attention="torch.blocked")
        kernelhub.attention(*operands(900))
        audit = the_audit("torch.blocked")
        assert (audit.checked, audit.wrong, audit.disputed) == (1, 0, 1)
        assert "the result of liar.k differs" in told.text


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("KERNELHUB_AUDIT", "1.5", "is not a share from 0 to 1"),
        ("KERNELHUB_AUDIT", "often", "is not a share from 0 to 1"),
        ("KERNELHUB_AUDIT", "nan", "is not a share from 0 to 1"),
        ("KERNELHUB_AUDIT_BYTES", "1 GiB", "is not a positive number of bytes"),
        ("KERNELHUB_AUDIT_ACTION", "stop", "neither record nor quarantine"),
    ],
)
def test_settings_that_mean_nothing_are_errors(variable, text, message, monkeypatch) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigurationError, match=message):
        kernelhub.reload()
    monkeypatch.delenv(variable)
    kernelhub.reload()


@pytest.mark.parametrize("arguments", [{"audit": 2}, {"audit": "1"}, {"audit": True, "audit_action": "stop"}])
def test_words_that_mean_nothing_are_errors(arguments) -> None:
    with pytest.raises(ConfigurationError, match="configure: audit"):
        kernelhub.configure(**arguments)


class TestSchedule:
    def test_takes_the_share_of_calls(self) -> None:
        plan = schedule.Schedule(1e-2, "x", 7)
        taken = [number for number in range(100_000) if plan.takes(number, 0)]
        assert len(taken) == pytest.approx(1000 + 7, abs=3)

    def test_takes_one_call_of_each_stretch_and_no_multiple_of_it_alone(self) -> None:
        plan = schedule.Schedule(1e-2, "x", 7)
        taken = [number for number in range(20_000) if plan.takes(number, 0) and number >= 200]
        assert {number // 100 for number in taken} == set(range(2, 200))
        assert len({number % 100 for number in taken}) > 50

    def test_takes_all_calls_where_the_share_is_one(self) -> None:
        plan = schedule.Schedule(1.0, "x", 7)
        assert all(plan.takes(number, 0) for number in range(100))

    def test_takes_the_first_call_of_each_new_size(self) -> None:
        plan = schedule.Schedule(1e-6, "x", 7)
        sizes = [1, 1, 1, 1, 1, 1, 2, 1, 2, 3, 3]
        taken = [number for number, size in enumerate(sizes) if plan.takes(number, size)]
        assert taken == [0, 1, 2, 4, 6, 8, 9]

    def test_processes_and_problems_take_others(self) -> None:
        def takes(seed, phase):
            plan = schedule.Schedule(1e-2, seed, phase)
            return [number for number in range(1000) if plan.takes(number, 0)]

        assert takes("x", 1) == takes("x", 1)
        assert takes("x", 1) != takes("x", 2)
        assert takes("x", 1) != takes("y", 1)
