"""`kernelhub.agree` with real processes: one plan or none, and what is wrong is named, in bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

import kernelhub
from kernelhub.dispatch.constraint import Rule
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import ConfigurationError, RanksDisagree
from kernelhub.runtime.ranks import meeting
from kernelhub.runtime.ranks.statement import policy_words
from tests.runtime import scenes
from tests.runtime.scenes import LATE_S, NEED, OTHER, PATIENT_S, plugin
from tests.runtime.world import attempt, end_this_process, run_world

SIZE = 3
TIMEOUT_S = 6.0
SLOW_S = 20.0  # what two busy cores may take for what takes one second
GRACE_S = meeting.LINGER_S + 3.0  # of a rank that holds the store until others have read the end, and of slow cores
pytestmark = pytest.mark.xdist_group("ranks")  # each group of processes wants the cores for itself


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank said in each scene."""
    answers = run_world(SIZE, scenes.act, tmp_path_factory.mktemp("ranks"), limit_s=240)
    assert None not in answers, "a rank ended before its scenes did"
    return answers


@pytest.fixture
def scene(world: list[dict[str, Any]], request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank said in the scene that the test is named after."""
    name = request.node.name.removeprefix("test_").partition("[")[0]
    return [answers[name] for answers in world]


def values(scene: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each rank agreed on."""
    for answer in scene:
        assert "value" in answer, answer
    return [answer["value"] for answer in scene]


def failure(scene: list[dict[str, Any]], code: str, ranks: list[int]) -> str:
    """The message of a failure that all ranks tell in the same words."""
    assert {answer["code"] for answer in scene} == {code}
    assert len({answer["message"] for answer in scene}) == 1
    assert scene[0]["ranks"] == ranks
    return scene[0]["message"]


class TestAgreement:
    def test_all_alike(self, scene):
        answers = values(scene)
        assert {answer["kernel"] for answer in answers} == {"cpp.split_kv"}
        assert {answer["called"] for answer in answers} == {"cpp.split_kv"}
        assert len({answer["digest"] for answer in answers}) == 1
        assert {answer["fingerprint"][:3] for answer in answers} == {"v1:"}
        for answer in answers:
            assert (answer["source"], answer["selected"]) == ("ranks", "cpp.split_kv")
            assert answer["codes"]["cpp.split_kv"][1] == f"the agreement of {SIZE} ranks"
            assert answer["tuned"] == {"paged_attention": {"tile": 0}}, "the table is that of rank 0"

    def test_a_large_table(self, scene):
        assert values(scene) == [True] * SIZE
        assert [answer["own"] for answer in scene] == [True, False, False]

    def test_one_rank_refuses(self, scene):
        answers = values(scene)
        assert {answer["kernel"] for answer in answers} == {"cpp.split_kv"} == {answer["called"] for answer in answers}
        for rank in (0, 2):
            code, reason, remedy = answers[rank]["codes"]["extra.kernel"]
            assert code == "refused_by_rank"
            assert reason == "rank 1 refuses it: broken_here: out of order here"
            assert remedy == "on rank 1: mend it"
        assert answers[1]["codes"]["extra.kernel"][0] == "broken_here", "on the rank itself, its own reason"
        assert "rank 1 refuses extra.kernel: out of order here" in answers[2]["text"]

    def test_the_lead_refuses(self, scene):
        answers = values(scene)
        assert {answer["called"] for answer in answers} == {"cpp.split_kv"}
        assert answers[2]["codes"]["extra.kernel"][1].startswith("rank 0 refuses it: broken_here")

    def test_the_lead_alone_verified_it(self, scene):
        answers = values(scene)
        assert {answer["called"] for answer in answers} == {"cpp.split_kv"}
        code, reason, remedy = answers[0]["codes"]["extra.kernel"]
        assert code == "refused_by_rank"
        assert "refuses it: untrusted: would be first; untested on " in reason
        assert remedy.startswith("on rank 1: kernelhub verify paged_attention --backend extra.kernel")

    def test_one_rank_alone_verified_it(self, scene):
        answers = values(scene)
        assert {answer["called"] for answer in answers} == {"cpp.split_kv"}
        assert "refuses it: untrusted" in answers[1]["codes"]["extra.kernel"][1]

    @pytest.mark.fault("rank_without_package")
    def test_one_rank_lacks_the_package(self, scene):
        answers = values(scene)
        assert {answer["called"] for answer in answers} == {"cpp.split_kv"}
        assert answers[0]["codes"]["extra.kernel"][:2] == [
            "refused_by_rank",
            "rank 1 refuses it: package_missing: kernelhub_test_library is not installed",
        ]

    def test_one_rank_cannot_load(self, scene):
        answers = values(scene)
        assert {answer["called"] for answer in answers} == {"cpp.split_kv"}
        assert "rank 2 refuses it: load_library: importing" in answers[1]["codes"]["extra.kernel"][1]
        assert "libextra.so: cannot open" in answers[1]["codes"]["extra.kernel"][1]
        assert answers[2]["codes"]["extra.kernel"][0] == "load_library"

    def test_a_plan_of_another_kernel(self, scene):
        for rank, answer in enumerate(scene):
            assert answer["had"] == ("torch.blocked" if rank == 0 else "cpp.split_kv")
            assert answer["stale"] == ([] if rank == 0 else [True])
            assert answer["ran"] == [1, 4, 128] == answer["fresh_ran"]
            assert answer["fresh"] == "torch.blocked"
            if rank:
                assert answer["again"]["code"] == "agreement_broken"
                assert "this plan runs cpp.split_kv, but 3 ranks agreed on torch.blocked" in answer["again"]["message"]
            else:
                assert answer["again"]["value"] == [1, 4, 128]

    def test_a_part_of_the_ranks(self, scene):
        assert scene[0] == "agree: this process is not in the group; only its ranks may call this"
        assert scene[1:] == [[0, 2, "cpp.split_kv"], [1, 2, "cpp.split_kv"]]

    def test_later_disagreement(self, scene):
        for rank, answer in enumerate(scene):
            assert answer["first"]["value"]["called"] == "cpp.split_kv"
            assert answer["later"]["code"] == "agreement_broken"
            assert f"rank {rank} would run torch.blocked (backend='torch.blocked')" in answer["later"]["message"]
            assert "3 ranks agreed on cpp.split_kv" in answer["later"]["message"]
            assert answer["after"]["value"] == "torch.blocked", "a reload ends the agreement"


class TestDisagreement:
    def test_one_rank_has_another_version_of_the_package(self, scene):
        message = failure(scene, "library_differs", [0, 1])
        assert "extra.kernel is of kernelhub_test_library 2.0 on rank 1" in message
        assert "of kernelhub_test_library 1.0 on rank 0" in message

    def test_one_rank_refuses_in_strict(self, scene):
        message = failure(scene, "refused_by_rank", [1])
        assert "rank 0 selects extra.kernel, and strict is on" in message

    def test_one_rank_can_run_nothing_of_what_is_forced(self, scene):
        message = failure(scene, "no_common_kernel", [1])
        assert "rank 1 refuses extra.kernel: broken_here: out of order here" in message

    def test_another_variable(self, scene):
        message = failure(scene, "policy_differs", [0, 2])
        assert "KERNELHUB_DISABLE is torch.blocked on rank 2" in message
        assert "and unset on rank 0" in message

    def test_another_configuration(self, scene):
        message = failure(scene, "policy_differs", [0, 1])
        assert "configure() is prefer *=torch.blocked on rank 1" in message

    def test_a_wrong_variable(self, scene):
        message = failure(scene, "rank_failed", [1])
        assert "unknown variable KERNELHUB_DISABEL (did you mean KERNELHUB_DISABLE?)" in message

    def test_another_version_of_kernelhub(self, scene):
        message = failure(scene, "version_differs", [0, 2])
        assert "runs kernelhub 0.0.9, rank 0" in message

    def test_another_record(self, scene):
        assert "the record of extra.kernel is" in failure(scene, "record_differs", [0, 1])

    def test_other_problems(self, scene):
        message = failure(scene, "problems_differ", [0, 1])
        assert "rank 0 plans for paged_attention" in message
        assert "(2 differ)" in message

    def test_nothing_is_held_after_a_disagreement(self, world):
        assert world[0]["one_rank_comes_too_late_and_then_in_time"]["second"]["value"] == SIZE


class TestTime:
    @pytest.mark.fault("rank_too_late")
    def test_one_rank_comes_too_late_and_then_in_time(self, scene):
        for rank in (0, 1):
            assert (scene[rank]["first"]["code"], scene[rank]["first"]["ranks"]) == ("rank_missing", [2])
            assert LATE_S <= scene[rank]["first"]["elapsed_s"] < LATE_S + GRACE_S
        late = scene[2]["first"]
        assert (late["code"], late["ranks"]) == ("too_late", [2])
        given_up = "rank 2 came too late; the others had given up: rank 2 did not call agree() within 3 s"
        assert given_up in late["message"]
        assert late["elapsed_s"] < SLOW_S, "it is told at once, and does not wait for others"
        assert [answer["second"].get("value") for answer in scene] == [SIZE] * SIZE

    @pytest.mark.fault("rank_slow")
    def test_one_rank_takes_too_long_to_choose(self, scene):
        for answer in scene:
            assert (answer["code"], answer["ranks"]) == ("rank_slow", [1])
            assert answer["elapsed_s"] < 5 + 6
        assert "called agree() and runs, but was not ready within 5 s" in scene[0]["message"]
        assert "rank 1 was still selecting kernels after 5 s" in scene[1]["message"]


def in_several_groups(rank: int, size: int) -> dict[str, Any]:
    """Agree in pairs, in all, twice, across pairs, and after a reload."""
    import torch.distributed as dist

    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [1, 3])]  # every rank calls these
    said = {}

    def say(name: str, group: Any = None) -> None:
        said[name] = attempt(lambda: kernelhub.agree(group, NEED, timeout_s=30, device="cpu").size)

    say("pair", pairs[rank // 2])
    say("all")
    say("again")
    if rank in (1, 3):
        say("across", pairs[2])
    kernelhub.reload()
    said["free"] = scenes.call(backend="torch.blocked")
    say("reloaded")
    return said


def test_groups_of_other_sizes_agree_one_after_the_other(tmp_path) -> None:
    answers = run_world(4, in_several_groups, tmp_path)
    for rank, answer in enumerate(answers):
        assert answer.pop("free") == "torch.blocked", "a reload ends what was agreed on"
        sizes = {name: said.get("value") for name, said in answer.items()}
        wanted = {"pair": 2, "all": 4, "again": 4, "reloaded": 4}
        assert sizes == (wanted | {"across": 2} if rank in (1, 3) else wanted)


def ends(rank: int, victim: int, by: signal.Signals, before: bool) -> dict[str, Any]:
    """Agree, but that one rank ends before it calls `agree` or while it chooses."""
    meeting.SILENT_S = 3.0  # in this process, which is one of the group's
    if rank == victim and before:
        end_this_process(by)
    plugin(Rule((), lambda problem: end_this_process(by) if rank == victim else None))
    timeout_s = PATIENT_S if by == signal.SIGKILL and not before else TIMEOUT_S
    return attempt(lambda: kernelhub.agree(what=NEED, timeout_s=timeout_s, device="cpu").size)


def killed_before(rank: int, size: int) -> Any:
    return ends(rank, 1, signal.SIGKILL, before=True)


def killed_while_choosing(rank: int, size: int) -> Any:
    return ends(rank, 1, signal.SIGKILL, before=False)


def lead_killed_while_choosing(rank: int, size: int) -> Any:
    return ends(rank, 0, signal.SIGKILL, before=False)


def stopped_while_choosing(rank: int, size: int) -> Any:
    return ends(rank, 1, signal.SIGSTOP, before=False)


def lead_stopped_while_choosing(rank: int, size: int) -> Any:
    return ends(rank, 0, signal.SIGSTOP, before=False)


@pytest.mark.parametrize(
    ("act", "victim", "store_here", "codes", "limit_s"),
    [
        pytest.param(
            killed_before, 1, False, {"rank_missing"}, TIMEOUT_S + 2, marks=pytest.mark.fault("rank_never_came")
        ),
        pytest.param(killed_while_choosing, 1, False, {"rank_dead"}, SLOW_S, marks=pytest.mark.fault("rank_killed")),
        pytest.param(
            stopped_while_choosing,
            1,
            False,
            {"rank_silent", "rank_slow"},
            TIMEOUT_S + 2,
            marks=pytest.mark.fault("rank_stopped"),
        ),
        # The store that it held is gone, too; a busy machine may take longer than the time-out to say so.
        (lead_killed_while_choosing, 0, False, {"rank_dead", "store_lost", "store_silent"}, SLOW_S),
        pytest.param(
            lead_stopped_while_choosing,
            0,
            False,
            {"store_silent"},
            TIMEOUT_S + 6,
            marks=pytest.mark.fault("lead_stopped"),
        ),
        (lead_killed_while_choosing, 0, True, {"rank_dead"}, SLOW_S),
        (lead_stopped_while_choosing, 0, True, {"rank_silent", "rank_slow"}, TIMEOUT_S + 2),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_rank_that_ends_is_named_by_all_others(act, victim, store_here, codes, limit_s, tmp_path) -> None:
    answers = run_world(4 if victim else 3, act, tmp_path, store_here=store_here)
    assert answers[victim] is None
    others = [answer for rank, answer in enumerate(answers) if rank != victim]
    assert {answer["code"] for answer in others} <= codes
    for answer in others:
        assert answer["ranks"] == [victim]
        assert answer["elapsed_s"] < limit_s, answer
        assert f"rank {victim}" in answer["message"]


def is_stopped_and_continued_then_looks_late(rank: int, size: int) -> Any:
    """Rank 1 is stopped, and continued; later it is of another version and looks at the store only now and then."""
    meeting.SILENT_S = 2.0  # in this process, which is one of the group's
    stopped = []

    def stop_once(problem: Any) -> None:
        if rank == 1 and not stopped:
            stopped.append(True)
            later = f"sleep 5; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", later], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)

    plugin(Rule((), stop_once))
    silent = attempt(lambda: kernelhub.agree(what=NEED, timeout_s=TIMEOUT_S, device="cpu").size)
    if rank == 1:
        kernelhub.__version__, meeting._PAUSE_S = "0.0.1", (2.0, 2.0)
    return [attempt(lambda: kernelhub.agree(what=NEED, timeout_s=PATIENT_S, device="cpu").size), silent]


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory, monkeypatch_module: pytest.MonkeyPatch) -> list[Any]:
    """What both ranks said of both."""
    monkeypatch_module.setattr("tests.runtime.world._owed", len)  # a rank that is stopped answers yet
    folder = tmp_path_factory.mktemp("continued")
    return run_world(2, is_stopped_and_continued_then_looks_late, folder, limit_s=60)


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_the_offending_rank_gets_the_same_error_as_the_others(continued: list[Any]) -> None:
    assert {differs["code"] for differs, _ in continued} == {"version_differs"}
    assert len({differs["message"] for differs, _ in continued}) == 1


def test_a_rank_that_is_stopped_and_continued_ends_in_the_same_error(continued: list[Any]) -> None:
    for _, answer in continued:
        assert (answer["code"], answer["ranks"]) == ("rank_silent", [1])
        assert answer["elapsed_s"] < SLOW_S


def lead_is_stopped_and_continued(rank: int, size: int) -> Any:
    """Rank 0, which holds the store, is stopped until the others have waited in vain for an answer of it."""
    meeting.GRACE_S = 1.0  # in this process, which is one of the group's
    stopped = []

    def stop_once(problem: Any) -> None:
        if rank == 0 and not stopped:
            stopped.append(True)
            later = f"sleep 6; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", later], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)

    plugin(Rule((), stop_once))
    answer = attempt(lambda: kernelhub.agree(what=NEED, timeout_s=3.0, device="cpu").size)
    if rank:
        time.sleep(5)  # its thread that looked at the store looks again once that is back
    return answer


def test_a_lead_that_is_stopped_and_continued_ends_in_the_same_error(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("tests.runtime.world._owed", len)  # a rank that is stopped answers yet
    answers = run_world(2, lead_is_stopped_and_continued, tmp_path, limit_s=60)
    assert {(answer["code"], *answer["ranks"]) for answer in answers} == {("store_silent", 0)}


class TestAlone:
    """Without a process group this process is the only rank."""

    def test_it_agrees_with_itself(self):
        result = kernelhub.agree(what=[NEED, OTHER], device="cpu")
        assert (result.rank, result.size, len(result.choices)) == (0, 1, 2)
        selection = kernelhub.explain("paged_attention", device="cpu", **dict(NEED.facets))
        assert (selection.source, selection.because) == ("ranks", "the agreement of this one rank")

    def test_what_it_has_chosen_so_far_is_what_it_agrees_on(self):
        assert scenes.call() == "cpp.split_kv"
        assert [choice.op for choice in kernelhub.agree().choices] == ["paged_attention"]
        assert scenes.call() == "cpp.split_kv"

    def test_what_it_has_chosen_is_judged_by_what_holds_now(self):
        assert scenes.call() == "cpp.split_kv"
        kernelhub.configure(disable="cpp.split_kv")
        (choice,) = kernelhub.agree().choices
        assert choice.kernel != "cpp.split_kv"
        assert scenes.call() == choice.kernel

    def test_what_a_call_requested_by_name_is_agreed_on_as_requested(self):
        assert scenes.call(backend="torch.blocked") == "torch.blocked"
        (choice,) = kernelhub.agree().choices
        assert choice.kernel == "torch.blocked"
        assert scenes.call() == scenes.call(backend="torch.blocked") == "torch.blocked"

    def test_a_later_agreement_adds_to_an_earlier_one(self):
        kernelhub.agree(what=NEED, device="cpu")
        kernelhub.agree(what=OTHER, device="cpu")
        for need in (NEED, OTHER):
            assert kernelhub.explain("paged_attention", device="cpu", **dict(need.facets)).source == "ranks"

    def test_a_kernel_that_cannot_be_loaded_gives_way(self):
        plugin(target="tests.runtime.absent:Kernel")
        (choice,) = kernelhub.agree(what=NEED, device="cpu").choices
        assert choice.kernel == "cpp.split_kv"
        assert choice.refused["extra.kernel"].code == "load_failed"

    def test_a_model_is_agreed_on_by_its_name(self):
        result = kernelhub.agree(what="gpt-oss-120b", tp=8, device="cpu")
        assert {choice.op for choice in result.choices} >= {"paged_attention", "fused_moe", "route_experts"}
        assert result.to_dict()["choices"][0]["fingerprint"].startswith("v1:")

    @pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), 1e9])
    def test_a_time_out_that_is_none_is_refused(self, timeout_s):
        with pytest.raises(ConfigurationError, match="give seconds, more than 0, at most a day"):
            kernelhub.agree(what=NEED, timeout_s=timeout_s, device="cpu")

    @pytest.mark.parametrize(
        ("variables", "words"),
        [
            ({}, {}),
            ({"KERNELHUB_STRICT": "yes"}, {"KERNELHUB_STRICT": "True"}),
            ({"KERNELHUB_STRICT": "1"}, {"KERNELHUB_STRICT": "True"}),
            ({"KERNELHUB_PLUGINS": "all", "KERNELHUB_LOCK_MISSING": "auto", "KERNELHUB_LOG": "selection"}, {}),
            ({"KERNELHUB_PREFER": "triton"}, {"KERNELHUB_PREFER": "triton"}),
            ({"VLLM_BATCH_INVARIANT": "1"}, {"variables of other projects": "batch_invariant=True"}),
        ],
        ids=str,
    )
    def test_what_was_said_is_compared_by_what_it_means(self, monkeypatch, variables, words):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        kernelhub.reload()
        assert policy_words() == words

    def test_two_kernels_for_one_problem_class_are_refused(self):
        plans = [scenes.prepared()[0], scenes.prepared(backend="torch.blocked")[0]]
        with pytest.raises(ConfigurationError, match=r"run cpp\.split_kv and torch\.blocked"):
            kernelhub.agree(what=plans)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"what": [3]}, "3 is not a plan, a selection of explain or a need"),
            ({"timeout_s": 0}, "timeout_s is 0"),
            ({"what": NEED, "tuned": {"x": {1, 2}}}, "tuned has values that JSON does not support"),
            ({"what": NEED, "tuned": {1: 2}}, "JSON would change tuned"),
            ({"process_group": object()}, "torch.distributed is not initialised"),
            ({"what": "lama-3.1-8b"}, r"did you mean llama-3\.1-8b"),
        ],
    )
    def test_wrong_arguments_are_reported(self, arguments, message):
        with pytest.raises(ConfigurationError, match=message):
            kernelhub.agree(**arguments)

    def test_nothing_can_run(self):
        with kernelhub.use(disable=["cpp", "torch", "triton"]), pytest.raises(RanksDisagree) as caught:
            kernelhub.agree(what=NEED, device="cpu")
        assert caught.value.code == "no_common_kernel"
        assert HUB.agreed == {}
