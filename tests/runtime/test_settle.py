"""What ranks settle on, from plain statements: rank 0's order of what all can run, and a name for each difference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import kernelhub
from kernelhub.runtime.ranks.settle import Failure, Refusal, settle

ROOT = Path(kernelhub.__file__).parent
KEY = "op {}"


def statement(rank: int, *order: str, refused: dict[str, tuple[str, str, str]] | None = None, **more: Any) -> Any:
    """One rank's, for one problem class."""
    kernels = {name: {"versions": {"lib": "1"}, "record": "r"} for name in order}
    return {
        "rank": rank,
        "where": f"host{rank}, process 1",
        "kernelhub": "1",
        "policy": {},
        "strict": False,
        "kernels": {"op": kernels},
        "selections": {KEY: {"order": list(order), "because": f"order of {rank}", "refused": refused or {}}},
        **more,
    }


class TestOrder:
    def test_of_what_all_can_run_the_lead_ranks_first(self):
        """As with GPUs of two families, whose orders differ."""
        settled = settle([statement(0, "a", "b", "c"), statement(1, "c", "b"), statement(2, "b", "c", "a")])[KEY]
        assert (settled.kernel, settled.because) == ("b", "order of 0")
        assert settled.refused == {"a": Refusal(1, "kernel_unknown", "no kernel of that name is registered there")}

    def test_the_first_rank_that_refuses_is_reported_with_its_reason(self):
        why = ("package_missing", "lib is not installed", "pip install lib")
        settled = settle([statement(0, "a", "b"), statement(1, "b", refused={"a": why}), statement(2, "b")])[KEY]
        assert settled.refused == {"a": Refusal(1, *why)}

    def test_what_a_rank_could_not_load_is_refused_by_it(self):
        failed = {KEY: {"a": Refusal(1, "load_failed", "no such file")}}
        settled = settle([statement(0, "a", "b"), statement(1, "a", "b")], failed)[KEY]
        assert (settled.kernel, settled.refused) == ("b", failed[KEY])

    def test_alone_a_rank_settles_on_its_own_selection(self):
        assert settle([statement(0, "a")])[KEY].kernel == "a"

    def test_no_problems_are_settled_at_once(self):
        assert settle([statement(0, selections={}), statement(1, selections={})]) == {}


class TestFailures:
    @pytest.mark.parametrize(
        ("other", "code", "message"),
        [
            (
                statement(1, "a", kernelhub="2"),
                "version_differs",
                r"rank 1 \(host1, process 1\) runs kernelhub 2, rank 0",
            ),
            (
                statement(1, "a", policy={"use()": "x"}),
                "policy_differs",
                r"use\(\) is x on rank 1 .* and unset on rank 0",
            ),
            (statement(1, "a", selections={}), "problems_differ", "rank 0 plans for op {}, rank 1 .* does not"),
            (statement(1, "b"), "no_common_kernel", "rank 1 refuses a: kernel_unknown"),
            (statement(1), "no_common_kernel", "rank 1 refuses a"),
            (
                statement(1, "a", kernels={"op": {"a": {"versions": {"lib": "2"}, "record": "r"}}}),
                "library_differs",
                "lib 2",
            ),
            (
                statement(1, "a", kernels={"op": {"a": {"versions": {"lib": "1"}, "record": "s"}}}),
                "record_differs",
                "is s on",
            ),
        ],
        ids=lambda value: value if isinstance(value, str) and value.islower() and " " not in value else "",
    )
    def test_each_difference_has_a_code_and_names_both(self, other, code, message):
        failure = settle([statement(0, "a"), other])
        assert isinstance(failure, Failure)
        assert failure.code == code
        assert 1 in failure.ranks
        assert re.search(message, failure.message)

    def test_strict_lets_no_other_kernel_take_the_place_of_the_first(self):
        ranks = [statement(0, "a", "b", strict=True), statement(1, "b", strict=True)]
        assert settle(ranks).code == "refused_by_rank"
        assert settle([statement(0, "b", strict=True), statement(1, "b", strict=True)])[KEY].kernel == "b"

    def test_a_version_is_reported_before_what_follows_from_it(self):
        other = statement(1, "b", kernelhub="2", policy={"x": "y"})
        assert settle([statement(0, "a"), other]).code == "version_differs"


def test_every_code_of_a_failure_is_on_the_page() -> None:
    page = (ROOT.parent / "docs" / "ranks.md").read_text()
    sources = "".join(path.read_text() for path in (ROOT / "runtime" / "ranks").glob("*.py"))
    codes = set(re.findall(r"(?:Failure|RanksDisagree)\(\s*\"([a-z_]+)\"", sources))
    assert len(codes) > 15
    assert {code for code in codes if f"`{code}`" not in page} == set()
