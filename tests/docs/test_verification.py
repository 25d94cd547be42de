"""The records behind docs/verification.md count what ran, and the page says of nothing else that it was run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import record_verification  # noqa: E402
import verification_page  # noqa: E402

from kernelhub.ops import functions  # noqa: E402

KERNELS = [("attention", "torch.sdpa"), ("attention", "triton.prefill"), ("paged_attention", "triton.prefill")]

JUNIT = """<testsuites><testsuite>
<testcase name="a"><properties><property name="ran" value="attention triton.prefill"/></properties></testcase>
<testcase name="b"><properties>
  <property name="ran" value="attention triton.prefill"/><property name="ran" value="attention torch.sdpa"/>
</properties></testcase>
<testcase name="c"><properties><property name="ran" value="attention torch.sdpa"/></properties><failure/></testcase>
<testcase name="d"><properties><property name="ran" value="attention torch.sdpa"/></properties><skipped/></testcase>
<testcase name="e"/>
</testsuite></testsuites>"""


def plain(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Any:
    return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results with nothing in it."""
    monkeypatch.setattr(verification_page, "RESULTS", tmp_path)
    return tmp_path


class TestRecord:
    def test_a_test_counts_for_every_kernel_that_ran_in_it(self, tmp_path: Path) -> None:
        path = tmp_path / "tests.xml"
        path.write_text(JUNIT)
        assert record_verification.tests([path]) == [
            {"op": "attention", "kernel": "torch.sdpa", "passed": 1, "failed": 1},
            {"op": "attention", "kernel": "triton.prefill", "passed": 2, "failed": 0},
        ]
        assert record_verification.tests([path, path])[1]["passed"] == 4

    def test_what_ran_is_noted_of_a_test(self, tmp_path: Path) -> None:
        path = tmp_path / "tests.xml"
        case = "tests/backends/test_torch.py::TestConcat::test_a_plan_gives_what_the_call_gives"
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", case, "--junitxml", str(path)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120, env=dict(os.environ))
        ran = record_verification.tests([path])
        assert ran == [{"op": "concat_mla_k", "kernel": "torch.concat", "passed": 1, "failed": 0}]


class TestPage:
    def test_without_a_record_nothing_was_run(self, results: Path) -> None:
        for row in verification_page.tested(KERNELS, plain):
            assert row["on a CPU"] == row["on an H200"] == "no record"
            assert row["measured"] == "no"
        assert verification_page.compiled(KERNELS, plain) == [
            {"op": op, "kernel": f"`{kernel}`"} for op, kernel in KERNELS[1:]
        ]

    def test_what_failed_or_does_not_fit_is_shown(self, results: Path) -> None:
        ran = {"op": "attention", "kernel": "triton.prefill", "passed": 7, "failed": 2}
        made = {"op": "attention", "kernel": "triton.prefill", "device": "A100", "launches": 9, "too_large": 1}
        made |= {"most_shared_memory_bytes": 98304, "spilling": 3, "most_spilled_bytes": 72}
        (results / "verification_cpu.json").write_text(json.dumps({"tests": [ran], "ahead": [made]}))
        timed = {"rows": [{"op": "attention", "kernels_ms": {"triton.prefill": 1.0}}]}
        (results / "h200.json").write_text(json.dumps(timed))
        sdpa, dense, paged = verification_page.tested(KERNELS, plain)
        assert dense["on a CPU"] == "interpreted: 7 tests, **2 failed**"
        assert dense["on an H200"] == "no record"
        assert dense["measured"] == "H200"
        assert sdpa["on a CPU"] == paged["on a CPU"] == "not run"
        assert paged["measured"] == "no"
        dense, paged = verification_page.compiled(KERNELS, plain)
        assert dense["A100"] == "9, 96 KB, **1 too large**, 3 spill up to 72 B"
        assert paged["A100"] == "not compiled"

    def test_what_passed_in_another_run_alone_is_linked(self, results: Path) -> None:
        (results / "verification_h200.json").write_text(json.dumps({"tests": []}))
        runs = [
            {"kernels": ["torch.sdpa"], "passed": 9, "failed": 1},
            {"kernels": ["attention triton.prefill"], "passed": 3, "failed": 0},
        ]
        (results / "more_h200.json").write_text(json.dumps({"date": "2026-01-01", "runs": runs}))
        (results / "other_h100.json").write_text(json.dumps({"runs": [{**runs[1], "kernels": ["torch.sdpa"]}]}))
        sdpa, dense, paged = verification_page.tested(KERNELS, plain)
        assert dense["on an H200"] == "[a run of its own](../benchmarks/results/more_h200.json)"
        assert sdpa["on an H200"] == paged["on an H200"] == "not run"
        (results / "libraries_h200.json").write_text(json.dumps({"runs": [{**runs[1], "kernels": ["torch.sdpa"]}]}))
        verification_page._runs.cache_clear()
        assert verification_page.tested(KERNELS, plain)[0]["on an H200"] == "with its library, below"

    def test_every_kernel_of_every_op_has_a_row(self) -> None:
        page = (ROOT / "docs" / "verification.md").read_text()
        for function in functions():
            for kernel in function.kernels():
                assert f"| {function.op.contract.name} | `{kernel}` |" in page
