"""What scripts/verify_on_gpu.sh runs and how long that may take, and what its benchmarks keep when their time ends."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
NINE_MINUTES = 540
TO_START = 20  # seconds, of torch's import and pytest's help, which count to all seconds
TO_KILL = 10  # seconds that a part has after its limit: timeout's --kill-after
TO_END = 10  # of the last table and the archive

# Pytest's help goes on for more than a pipe takes: what reads it must read all.
PYTHON = """#!/usr/bin/env bash
case "$*" in
    "-c "*) echo "$GPUS_SEEN" ;;
    "-m pytest --help") printf '  --no-loadscope-reorder\\n' && head -c 300000 /dev/zero | tr '\\0' ' ' && exit ;;
    scripts/*) ;;
    *) sleep "${EACH_TAKES:-0}" ;;
esac
"""
TIMEOUT = """#!/usr/bin/env bash
(flock 9 && printf '%s\\n' "$@" ----) 9>>"$NOTED" >>"$NOTED"  # parts run at once, and bash writes a line at a time
shift 3
exec "$@"
"""


class Part(NamedTuple):
    seconds: int
    command: list[str]


@pytest.fixture
def parts(tmp_path: Path) -> Any:
    """Runs a copy of the script, with programs that only note what they are given; returns the parts in their order."""
    scripts, programs = tmp_path / "scripts", tmp_path / "programs"
    scripts.mkdir()
    programs.mkdir()
    shutil.copy(ROOT / "scripts" / "verify_on_gpu.sh", scripts)
    for name, text in (("python", PYTHON), ("timeout", TIMEOUT)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def run(gpus: object = 1, **variables: str) -> list[Part]:
        noted = tmp_path / "noted"
        noted.unlink(missing_ok=True)
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHON": str(programs / "python"),
            "GPUS_SEEN": str(gpus),
            "NOTED": str(noted),
            **variables,
        }
        command = ["bash", str(scripts / "verify_on_gpu.sh")]
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
        calls = [call.strip("\n").split("\n") for call in noted.read_text().split("----\n") if call.strip()]
        assert all(call[:2] == ["--signal=INT", f"--kill-after={TO_KILL}"] for call in calls)
        return [Part(int(call[2]), call[3:]) for call in calls]

    return run


class TestVerifyOnGpu:
    def test_tests_that_need_a_gpu_run_first_and_in_the_order_of_their_folders(self, parts: Any) -> None:
        first = parts()[0].command
        folders = [word for word in first if word.startswith("tests/")]
        assert folders[0] == "tests/gpu"
        assert "gpu or device" in first
        assert "--no-loadscope-reorder" in first[: first.index("tests/gpu")]

    def test_all_parts_together_take_less_than_nine_minutes(self, parts: Any) -> None:
        *others, last = parts(1)
        assert "tests" in last.command  # it has what is left, but some: all where the others, as here, take none
        least = 15
        assert TO_START + sum(part.seconds for part in others) + least <= last.seconds <= 520
        assert 520 + TO_KILL + TO_END <= NINE_MINUTES

    @pytest.mark.parametrize("gpus", [2, 4, 8])
    def test_several_gpus_are_measured_at_once(self, parts: Any, gpus: int) -> None:
        named = parts(gpus)
        benchmarks = [part for part in named if any(word.startswith("benchmarks/") for word in part.command)]
        alone = {
            next(word for word in part.command if word.startswith("CUDA_VISIBLE_DEVICES=")) for part in benchmarks[:2]
        }
        assert len(alone) == 2
        assert all(part.seconds <= 520 for part in named)
        assert any("tests/gpu/test_comm_on_gpu.py" in part.command for part in named)

    def test_another_call_goes_on_with_what_has_not_ended(self, parts: Any) -> None:
        first = parts("1 sources", ALL_SECONDS="12", BENCHMARKS="moe:5", EACH_TAKES="3")
        assert [_program(part) for part in first] == ["pytest", "benchmarks/moe.py", "benchmarks/host.py"]
        again = [_program(part) for part in parts("1 sources")]
        others = ["benchmarks/gemm.py", "benchmarks/mla.py", "benchmarks/attention.py", "benchmarks/dispatch.py"]
        assert again == [*others, "tests.fuzz", "tests.fuzz", "pytest"]
        assert len(parts("1 other sources")) > 3
        assert len(parts("1 other sources", FRESH="1")) > 3

    def test_no_part_has_more_than_is_left_of_all_seconds(self, parts: Any) -> None:
        long = parts(ALL_SECONDS="12", TESTS_SECONDS="600", BENCHMARKS="moe:300", EACH_TAKES="3")
        assert long[0].seconds in (11, 12)
        assert all(later.seconds <= earlier.seconds - 3 for earlier, later in itertools.pairwise(long))
        assert len(long) == 3  # the others are passed over

    def test_tests_end_before_their_part_does(self, parts: Any) -> None:
        for part in parts(2):
            if "--session-timeout" in part.command:
                own = int(part.command[part.command.index("--session-timeout") + 1])
                assert own + 15 <= part.seconds

    def test_benchmarks_show_some_cases_of_all_kinds_unless_all_are_asked_for(self, parts: Any) -> None:
        def options(**variables: str) -> dict[str, bool]:
            named = parts(BENCHMARKS="moe:90 dispatch:30", **variables)
            return {name: "--quick" in part.command for part in named if (name := _program(part)).startswith("bench")}

        assert options() == {
            "benchmarks/moe.py": True,
            "benchmarks/dispatch.py": False,
            "benchmarks/host.py": False,
        }
        assert not any(options(CASES="").values())


def _program(part: Part) -> str:
    return next(word for word in part.command if word in ("pytest", "tests.fuzz") or word.startswith("benchmarks/"))


def test_no_condition_of_a_script_breaks_the_pipe_of_what_it_reads() -> None:
    """With pipefail `command | grep -q` fails where the command writes on after the match."""
    scripts = [*(ROOT / "scripts").glob("*.sh"), *(ROOT / ".ci").iterdir()]
    assert len(scripts) > 5
    for script in scripts:
        text = script.read_text()
        assert "pipefail" not in text or "| grep -q" not in text.replace("`| grep -q`", ""), script


# It answers for two ops, of which the second has no Triton kernel, and ends at the third.
ANSWERS = """
import json, os, sys
slower = 2.0 if os.environ.get("KERNELHUB_DIRECT_LAUNCH") == "0" else 1.0
print(json.dumps({"device": "a GPU"}), flush=True)
for at, line in enumerate(sys.stdin):
    if at == 2:
        sys.exit(3)
    print(json.dumps({"call": 4.0 * slower} if at == 0 else {}), flush=True)
"""


def test_host_keeps_what_is_known_of_all_ways_after_each_op(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    host = importlib.import_module("host")
    program = tmp_path / "answers.py"
    program.write_text(ANSWERS)
    monkeypatch.setattr(host, "__file__", str(program))
    known: list[Any] = []
    with pytest.raises(RuntimeError, match="own, rms_norm_quant: the process ended with 3"):
        known.extend(
            json.dumps(result)
            for result in host.compare(("attention", "rms_norm_quant", "paged_attention"), 1, ("own", "triton"), 0.1)
        )
    first = {"own": {"call": 4.0}, "triton": {"call": 8.0}}
    assert [json.loads(text)["ops"] for text in known] == [{"attention": first}] * 2
    assert json.loads(known[0])["facts"] == {"device": "a GPU", "rounds": 1}


def test_dispatch_keeps_what_is_known_after_each_part_and_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    dispatch = importlib.import_module("dispatch")
    monkeypatch.setattr(dispatch, "measure_calls", lambda: {"miss": 1})
    for name in ("measure_import", "measure_table", "compile_ns"):
        monkeypatch.setattr(dispatch, name, lambda: 2)
    monkeypatch.setattr(dispatch, "measure_ops", lambda names: dict.fromkeys(names, 3))
    known: list[str] = []
    result = dispatch.measure(lambda found: known.append(json.dumps(found)))
    assert {"machine", "date", "miss"} == set(json.loads(known[0]))
    assert [len(json.loads(text).get("ops", ())) for text in known] == [0, 0, 0, 0, *range(len(result["ops"]) + 1)]
    assert json.loads(known[-1]) == result


def test_the_summary_shows_what_there_is_when_time_ran_out(tmp_path: Path) -> None:
    (tmp_path / "parts.txt").write_text("gpu_tests 0 90 190\ndispatch 124 25 25\nhost 124 40 40\nother_tests 124 0 0\n")
    (tmp_path / "dispatch.json").write_text(json.dumps({"miss": {"ns": 12_345.0}}))
    ops = {
        "attention": {"own": {"call": 4.0}, "triton": {"call": 8.0}},
        "paged_attention": {"own": {"call": 5.0}},
    }
    (tmp_path / "host.json").write_text(json.dumps({"facts": {}, "ops": ops}))
    command = [sys.executable, str(ROOT / "scripts" / "summary_of_gpu_run.py"), str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "dispatch, ns   miss 12,345\n" in shown
    assert "attention: call 4.0 (8.0)\n" in shown
    assert "other_tests    ran out of time       0 of 0 s" in shown
