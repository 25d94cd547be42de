"""The decisions about kernels that were not selected: computed when read, with the facts at the time of selection."""

from __future__ import annotations

import concurrent.futures
import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernelhub
from kernelhub.dispatch.constraint import Between, Package, Rejection, Rule
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Band
from kernelhub.dispatch.machine import Machine, SimulatedMachine
from kernelhub.dispatch.policy import Policy
from kernelhub.dispatch.reasons import can_run, reasons
from kernelhub.dispatch.select import as_preferred
from kernelhub.errors import NoKernel
from tests.dispatch.backends import qkv, record, register
from tests.dispatch.fakes import choose, kernel, problem
from tests.dispatch.test_select import kernels, override, policies, problems


@settings(max_examples=300, deadline=None)
@given(st.lists(kernels, min_size=1, max_size=6, unique_by=lambda k: k.name), policies, problems, st.data())
def test_the_first_that_can_run_is_the_best_of_all_that_can(candidates, policy, asked, data) -> None:
    """Asking every kernel for every reason, as `explain` does, gives the choice that was made without."""
    machine = SimulatedMachine({})
    for one in data.draw(st.lists(st.sampled_from(candidates), max_size=2)):
        machine.cannot_load("toy", one.name, Rejection("load_failed", "gone"))
    selection = choose(*candidates, policy=policy, asked=asked, machine=machine)
    kept: Any = selection.decide
    question, ranking = kept.inputs, kept.ranking
    for decision in selection.decisions:
        assert selection.against(decision.kernel) == decision.rejections
    able = [one for one in ranking if not list(reasons(question, one))]
    wished = as_preferred("toy", able, policy)
    assert selection.kernel is (wished[0] if wished else None)
    assert all(can_run(question, one) is (one in able) for one in ranking)
    accepted = [decision.kernel for decision in selection.decisions if decision.accepted]
    assert accepted == ([one.name for one in wished] if selection.kernel else [])


class TestTheMomentOfChoice:
    def test_kernels_behind_the_chosen_one_are_not_asked_until_somebody_looks(self) -> None:
        costly: list[int] = []
        behind = kernel("a.one", Rule(("width",), lambda asked: costly.append(asked.width)), band=Band.PORTABLE)
        selection = choose(behind, kernel("b.one", band=Band.TUNED))
        assert (selection.selected, costly) == ("b.one", [])
        assert [item.code for item in selection.decisions] == ["selected", "supported"]
        assert costly == [64]

    def test_a_failure_to_load_that_came_later_is_not_reported(self) -> None:
        machine = SimulatedMachine({})
        pair = kernel("a.one"), kernel("b.one")
        before = choose(*pair, machine=machine)
        machine.cannot_load("toy", "b.one", Rejection("load_failed", "gone"))
        assert [item.code for item in before.decisions] == ["selected", "supported"]
        assert [item.code for item in choose(*pair, machine=machine).decisions] == ["selected", "load_failed"]
        machine.forget()
        assert [item.code for item in choose(*pair, machine=machine).decisions] == ["selected", "supported"]

    def test_a_package_that_was_installed_later_is_not_reported(self, tmp_path: Path, monkeypatch) -> None:
        machine = Machine()
        pair = kernel("a.one"), kernel("b.one", Package("a_late_package", ">=1"))
        before = choose(*pair, machine=machine)
        (tmp_path / "a_late_package.py").write_text("__version__ = '1.0'\n")
        info = tmp_path / "a_late_package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a_late_package\nVersion: 1.0\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        machine.forget()
        now = choose(*pair, machine=machine)
        assert "a_late_package" not in sys.modules
        assert [item.code for item in now.decisions] == ["selected", "supported"]
        assert [item.code for item in before.decisions] == ["selected", "package_missing"]

    def test_neither_configuration_nor_backends_that_came_later_are_reported(self) -> None:
        register("ones", record("ones.k", "Ones"))
        early, late = (kernelhub.explain(kernelhub.attention, *qkv()) for _ in range(2))
        told = str(early)
        handle = register("twos", record("twos.k", "Twos"))
        kernelhub.configure(disable="torch")
        kernelhub.reload()
        assert str(late) == told
        assert late == early
        assert {item.kernel for item in late.decisions} == {*kernelhub.attention.kernels()} - {"twos.k"}
        handle.remove()

    def test_what_a_plan_came_from_is_what_explain_says(self) -> None:
        for backend in (None, "torch", ("triton", "torch.blocked")):
            plan = kernelhub.attention.prepare(*qkv(), backend=backend)
            assert plan.selection == kernelhub.explain(kernelhub.attention, *qkv(), backend=backend)
            assert str(plan.selection) == str(kernelhub.explain(kernelhub.attention, *qkv(), backend=backend))

    def test_an_error_has_every_reason(self) -> None:
        register("narrow", record("narrow.k", "Ones", Between("head_dim_qk", 1, 8), features=()))
        q, k, v = qkv()
        with pytest.raises(NoKernel) as caught:
            kernelhub.attention(q, k, v, softcap=2.0, backend="narrow")
        own = next(item for item in caught.value.selection.decisions if item.kernel == "narrow.k")
        assert [item.code for item in own.rejections] == ["range", "feature"]
        assert "outside 1 to 8" in str(caught.value)


class TestValue:
    def test_equal_selections_are_one_key(self) -> None:
        pair = kernel("a.one"), kernel("b.one", Between("width", 1, 32))
        first, second = choose(*pair), choose(*pair)
        assert first == second
        assert len({first, second}) == 1
        assert first != choose(*pair, asked=problem(width=32))
        assert first != "a.one"

    def test_equality_sees_every_decision(self) -> None:
        """Two selections that choose the same for the same reason, and differ in what they say of another kernel."""
        loser = kernel("b.one")
        policy = Policy(disables=(override("b"),))
        assert choose(A_ONE, loser).selected == choose(A_ONE, loser, policy=policy).selected
        assert choose(A_ONE, loser) != choose(A_ONE, loser, policy=policy)

    @pytest.mark.parametrize("look_first", [False, True])
    def test_what_is_stored_or_sent_reports_the_same(self, look_first: bool) -> None:
        selection = choose(A_ONE, kernel("b.one", Between("width", 1, 32)))
        if look_first:
            assert len(selection.decisions) == 2
        for again in (pickle.loads(pickle.dumps(selection)), copy.copy(selection), copy.deepcopy(selection)):
            assert again.to_dict() == selection.to_dict()
            assert str(again) == str(selection)
            assert again.decisions == selection.decisions

    def test_its_repr_shows_the_decisions(self) -> None:
        assert "decisions=(Decision(kernel='a.one', accepted=True, code='selected'" in repr(choose(A_ONE))

    def test_threads_that_look_at_once_see_the_same(self) -> None:
        selection = kernelhub.explain("paged_attention", device="H200", head_dim_qk=128)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            told = list(pool.map(lambda _: str(selection), range(64)))
        assert len(set(told)) == 1
        assert len(selection.decisions) == len(HUB.registry.candidates("paged_attention").kernels)


A_ONE = kernel("a.one", band=Band.TUNED)
