"""Every test has a tier, by rules that name what exists; naming a path runs it whole."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import tiers

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(tiers.FULL))
def test_what_a_rule_names_exists(name: str) -> None:
    path, *inside = name.split("::")
    assert (ROOT / path).exists()
    for part in inside:
        assert re.search(rf"^ *(class|def) {part}\b", (ROOT / path).read_text(), re.MULTILINE)


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


def test_one_case_shows_each_feature_of_each_kernel() -> None:
    cases = [
        (Case("plain", {"tokens": 5}), True),
        (Case("other size", {"tokens": 64}), False),
        (Case("causal", {"tokens": 5}, ("causal",)), True),
        (Case("causal, larger", {"tokens": 9}, ("causal",)), False),
        (Case("capped", {"tokens": 9}, ("causal", "softcap")), True),
        (Case("combination of known features", {"tokens": 9}, ("softcap", "causal")), False),
        (Case("another dtype", {"dtype": "float16"}), True),
        (Case("flag", {"masked": True}), True),
        (Case("flag, off", {"masked": False}), True),
        (Case("another parameter", {"page_size": 3}), True),
        (Case("another page size", {"page_size": 16}), False),
    ]
    for kernel in ("triton.one", "triton.other"):
        items = [item(case, kernel=kernel) for case, _ in cases]
        tiers.mark_full(items)
        assert [not item.marks for item in items] == [shows for _, shows in cases], kernel


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


def interpreted(label: str, *problem: str) -> Any:
    found = item(Case(label, {}))
    found.nodeid, found.originalname = f"{tiers.INTERPRETED}TestX::test_case[{label}]", "test_case"
    found.callspec.params = {"case": SimpleNamespace(problem=problem)}
    return found


@pytest.mark.skipif(tiers.HAS_GPU, reason="no kernel is interpreted here")
def test_the_full_tier_has_each_pair_of_features_and_a_third_of_the_other_cases() -> None:
    repeats = tiers.Repeats()
    cases = [("k=64",), ("k=64", "causal"), ("k=64", "sinks"), ("causal", "k=64", "sinks")]
    assert [repeats(interpreted("new", *words)) for words in cases] == [False] * 4
    same = [repeats(interpreted(f"size {size}", "k=64", "causal", "sinks")) for size in range(6)]
    assert same == [False, True, True, False, True, True]


def test_every_right_kernel_and_a_quarter_of_the_wrong_ones_are_verified() -> None:
    repeats = tiers.Repeats()
    names = ["op-Truth]", "op-DenseTruth]", "op-TrueExperts]", *(f"op-Lie{place}]" for place in range(5))]
    told = [repeats(SimpleNamespace(nodeid=tiers.LIES_VERIFIED + name)) for name in names]  # type: ignore[arg-type]
    assert told == [False] * 4 + [True] * 3 + [False]
