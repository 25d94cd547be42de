"""Every test has a tier, by rules that name what exists; naming a path runs it whole."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import shares, shown, tiers

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted({*tiers.FULL, *shares.SWEPT, *shares.ONE_OF, *shares.ONE_OF_FULL}))
def test_what_a_rule_names_exists(name: str) -> None:
    path, *inside = name.split("::")
    assert (ROOT / path).exists()
    if inside:
        text = (ROOT / path).read_text()
        homes = [
            ROOT / f"{module.replace('.', '/')}.py"
            for module in re.findall(r"^from (tests\.[\w.]+) import", text, re.M)
        ]
        text += "".join(home.read_text() for home in homes if home.exists())  # of statements that a class inherits
    for part in inside:
        assert re.search(rf"^ *(class|def) {part}\b", text, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(tiers.SWEEPS))
def test_a_sweep_is_a_statement_of_some_contract(name: str) -> None:
    assert any(f"def {name}(" in path.read_text() for path in (ROOT / "tests" / "contract").glob("*.py"))


@dataclasses.dataclass(frozen=True)
class Case:
    label: str
    inputs: dict[str, Any]
    features: tuple[str, ...] = ()


def item(case: Case, **params: Any) -> Any:
    marks: list[Any] = []
    return SimpleNamespace(
        originalname="test_right",
        fixturenames=(),
        nodeid=f"tests/backends/test_x.py::test_right[{case.label}]",
        callspec=SimpleNamespace(params={"case": case, **params}),
        get_closest_marker=lambda name: None,
        add_marker=marks.append,
        marks=marks,
    )


def tiers_of(items: list[Any]) -> list[str]:
    tiers.mark_full(items)
    return [item.marks[0].name if item.marks else "default" for item in items]


def test_few_cases_show_each_feature_of_each_kernel() -> None:
    cases = [
        (Case("plain", {"tokens": 5}), False),
        (Case("causal", {"tokens": 5}, ("causal",)), False),
        (Case("causal, larger", {"tokens": 9}, ("causal",)), False),
        (Case("shows the most", {"tokens": 9, "dtype": "float16"}, ("causal", "softcap")), True),
        (Case("combination of known features", {"tokens": 9}, ("softcap", "causal")), False),
        (Case("another dtype", {"dtype": "bfloat16"}), True),
        (Case("flag", {"masked": True}), True),
        (Case("flag, off", {"masked": False}), True),
        (Case("another parameter", {"page_size": 3}), True),
        (Case("another page size", {"page_size": 16}), False),
    ]
    for kernel in ("triton.one", "triton.other"):
        told = tiers_of([item(case, kernel=kernel) for case, _ in cases])
        assert told == ["default" if shows else "full" for _, shows in cases], kernel


def test_parameters_that_are_no_cases_count_where_they_are_new() -> None:
    items = [item(Case(str(place), {}), kernel="k", limit=limit) for place, limit in enumerate("aab")]
    for place, found in enumerate(items):
        del found.callspec.params["case"]
        found.nodeid += str(place)
    assert tiers_of(items) == ["default", "full", "default"]


def test_of_a_contract_of_an_emulated_kernel_the_default_tier_has_few_cases_alone() -> None:
    cases = [item(Case(label, {"tokens": 5}, features)) for label, features in (("a", ("lse",)), ("b", ("lse",)))]
    others = [item(Case(label, {})) for label in ("a statement", "a statement of no contract")]
    for test in (*cases, *others):
        test.nodeid = test.nodeid.replace("tests/backends/test_x.py::", "tests/gluon/test_x.py::TestX::")
        test.fixturenames = ("case",)
    for test in others:
        test.fixturenames, test.callspec = (), SimpleNamespace(params={})
    others[0].cls = SimpleNamespace(accepted_cases=list)
    assert tiers_of([*cases, *others]) == ["default", "full", "full", "default"]


def of(name: str, labels: str) -> list[Any]:
    """Tests of a function that is no kernel's."""
    found = [item(Case(label, {})) for label in labels.split()]
    for test in found:
        test.nodeid, test.originalname = f"{name}[{test.callspec.params['case'].label}]", name.rpartition("::")[2]
    return found


def test_of_one_mechanism_a_share_is_in_the_default_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tests/ops/test_x.py::test_all"
    monkeypatch.setattr(tiers, "ONE_OF", {name: 3})
    assert tiers_of(of(name, "a b c d e")) == ["default", "full", "full", "default", "full"]
    assert tiers_of(of(name + "_else", "a b c")) == ["default"] * 3


def test_of_repetitions_a_share_is_in_the_full_tier_and_the_others_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tests/fuzz/test_x.py::test_all"
    monkeypatch.setattr(tiers, "ONE_OF_FULL", {name: 2})
    assert tiers_of(of(name, "a b c")) == ["full", "sweep", "full"]
    monkeypatch.setattr(tiers, "SWEPT", frozenset({name}))
    assert tiers_of(of(name, "a b")) == ["sweep", "sweep"]


@pytest.mark.parametrize(
    ("source", "asked", "runs"),
    [
        ("TESTPATHS", tiers.DEFAULT, tiers.DEFAULT),
        ("ARGS", tiers.DEFAULT, tiers.BOTH),
        ("ARGS", "full", "full"),
        ("TESTPATHS", "full", "full"),
    ],
)
def test_a_path_that_is_named_runs_whole(source: str, asked: str, runs: str) -> None:
    config: Any = SimpleNamespace(
        args_source=pytest.Config.ArgsSource[source], option=SimpleNamespace(markexpr=asked), rootpath=ROOT
    )
    tiers.pytest_configure(config)
    assert config.option.markexpr == runs
    left_out = tiers.pytest_ignore_collect(ROOT / "tests" / "providers", config)
    assert bool(left_out) is (runs == tiers.DEFAULT)


STAND_IN = "tests/backends/test_deep_gemm.py::"


def cases(file: str, default: list[tuple[str, ...]], full: list[tuple[str, ...]]) -> list[bool]:
    """Which of the latter cases of a kernel repeat others, by their features."""
    items = []
    for place, problem in enumerate([*default, *full]):
        items.append(item(Case(str(place), {})))
        items[-1].nodeid, items[-1].originalname = f"{file}TestX::test_case[{place}]", "test_case"
        items[-1].callspec.params = {"case": SimpleNamespace(problem=problem)}
    repeats = shown.repeated(items, items[len(default) :])
    return [item.nodeid in repeats for item in items[len(default) :]]


@pytest.mark.parametrize("file", [STAND_IN] if shown.HAS_GPU else [STAND_IN, shown.INTERPRETED])
def test_the_full_tier_has_each_pair_of_features_and_a_share_of_the_other_cases(file: str) -> None:
    all_in_one = ("causal", "k=64", "sinks")
    several = [("k=64",), ("k=64", "causal"), ("k=64", "sinks"), all_in_one]
    assert cases(file, [], several) == [False, True, True, False], "one shows all pairs, the first is of the share"
    assert cases(file, [], [*several, ("causal", "k=128")]) == [False, True, True, False, False]
    assert cases(file, [all_in_one], several[1:2] * 2) == [False, True], "the default tier shows it"
    same = cases(file, [all_in_one], [all_in_one] * (2 * shown.OF_REPEATED))
    assert same == ([False] + [True] * (shown.OF_REPEATED - 1)) * 2


@pytest.mark.parametrize(("file", "one_of"), shown.REAL.items())
def test_of_kernels_that_run_here_as_for_users_the_share_is_larger(file: str, one_of: int) -> None:
    assert one_of < shown.OF_REPEATED
    same = cases(f"{file}.py::", [("k=64",)], [("k=64",)] * (2 * one_of))
    assert same == ([False] + [True] * (one_of - 1)) * 2


def test_right_kernels_among_lies_are_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tests/evidence/test_contract_liars.py::test_all"
    monkeypatch.setattr(tiers, "ONE_OF_FULL", {name: 3})
    told = tiers_of(of(name, "op-Truth op-DenseTruth TrueExperts op-LieA op-LieB True-NotTrue op-LieD"))
    assert told == ["full"] * 4 + ["sweep"] * 2 + ["full"]
