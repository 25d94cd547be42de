"""A run of tests on a GPU calls every kernel first, and the next one goes on with what has not passed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.going_on import OF_A_FORM, OF_A_KERNEL, Noted, expected_seconds, order, seconds_of

ROOT = Path(__file__).parents[2]
TESTS = [
    *(f"a.py::TestOne::test_strides[{i}]" for i in range(3)),
    *(f"a.py::TestOne::test_case[{i}]" for i in range(3)),
    *(f"a.py::TestOther::test_case[{i}]" for i in range(2)),
    *(f"b.py::test_long[{i}]" for i in range(2)),
    "b.py::test_short",
]


@pytest.fixture(autouse=True)
def known(monkeypatch) -> None:
    monkeypatch.setattr("tests.going_on.known_seconds", lambda: {"b.py::test_long": 9.0})


def test_one_test_of_each_class_comes_first_and_then_one_of_each_function() -> None:
    places = order(TESTS)
    assert sorted(places) == list(range(len(TESTS)))
    names = [TESTS[at] for at in places]
    kernels = ["b.py::test_long[0]", "a.py::TestOne::test_case[0]", "a.py::TestOther::test_case[0]", "b.py::test_short"]
    assert names[:4] == kernels
    assert names[4:6] == ["a.py::TestOne::test_strides[0]", "b.py::test_long[1]"]
    assert names[6:] == [name for name in TESTS if name not in names[:6]]


def test_what_compiles_or_is_known_to_be_long_is_handed_out_alone() -> None:
    seconds = dict(zip(TESTS, expected_seconds(TESTS), strict=True))
    assert seconds["b.py::test_long[1]"] == 9.0
    assert seconds["a.py::TestOther::test_case[0]"] == OF_A_KERNEL
    assert seconds["a.py::TestOne::test_strides[0]"] == OF_A_FORM
    assert seconds["a.py::TestOne::test_strides[1]"] == 0.0


def test_seconds_come_from_junit_files(tmp_path) -> None:
    cases = [("TestA", "test_x[1]", 4.0), ("TestA", "test_x[2]", 2.0), ("TestA", "test_y", 0.1)]
    rows = "".join(f'<testcase classname="tests.gpu.test_z.{a}" name="{b}" time="{c}"/>' for a, b, c in cases)
    file = tmp_path / "tests.xml"
    file.write_text(f"<testsuites><testsuite>{rows}</testsuite></testsuites>")
    assert seconds_of([file]) == {"tests/gpu/test_z.py::TestA::test_x": 3.0}


SMALL = """
import os, pathlib, pytest

@pytest.mark.parametrize("at", range(6))
def test_some(at):
    if at == 1:
        pytest.skip("not here")
    assert at != 4 or pathlib.Path("mended").exists()

def test_no_process_of_a_test_goes_on():
    assert not [name for name in os.environ if name.startswith("TESTS_PASSED")]
"""


def test_what_passed_is_left_out_until_nothing_is_left(tmp_path) -> None:
    (tmp_path / "test_small.py").write_text(SMALL)
    noted = tmp_path / "passed"

    def run(workers: str) -> tuple[int, str]:
        options = ["-q", "-p", "tests.going_on", "-p", "no:cacheprovider", "-n", workers]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TESTS_PASSED": str(noted)}
        command = [sys.executable, "-m", "pytest", *options]
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return ended.returncode, ended.stdout

    status, text = run("2")
    assert status == 1
    assert "1 failed, 5 passed, 1 skipped" in text
    assert noted.with_name("passed.all").read_text() == "7\n"
    (tmp_path / "mended").touch()
    status, text = run("0")
    assert status == 0
    assert "1 passed, 6 deselected" in text
    status, text = run("2")
    assert status == 0
    assert "passed" not in text


def test_what_passed_with_other_sources_counts_no_more(tmp_path) -> None:
    file = tmp_path / "folder" / "passed"
    assert Noted(file, "sources").before == []
    file.write_text("sources\na.py::test_one\n")
    assert Noted(file, "sources").before == ["a.py::test_one"]
    assert Noted(file, "others").before == []
    assert file.read_text() == "others\n"
