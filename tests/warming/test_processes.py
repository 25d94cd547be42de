"""Several processes of one node: one compiles, others wait and take over; killed or interrupted, nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import kernelhub
from kernelhub.ops.models.problems import Need
from kernelhub.probes.toolchain import cxx_compiler
from kernelhub.warming import crew
from kernelhub.warming.outcome import COMPILED, DECIDED, FAILED, LOADED
from tests.runtime.caches import ROOT

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here: nothing to compile")

# Two libraries of ours to compile: products, and batches of them are one; experts the other.
NEEDS = """
from kernelhub.ops.models.problems import Need
NEEDS = [
    Need("fp8_gemm", (("k", 128), ("n", 64)), ("decode",), ("o",)),
    Need("fused_moe", (("activation_dtype", "float8_e4m3fn"), ("hidden_size", 128), ("intermediate_size", 128),
                       ("num_experts", 4), ("top_k", 2), ("weights", "fp8_block")), ("decode",), ("experts",)),
]
"""
WARM = (
    NEEDS
    + """
import json, signal, sys
import kernelhub
from kernelhub.errors import LockTimeout

signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored in all that a shell runs in the background

timeout_s, jobs, count = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
def tell(beat):
    print(json.dumps([beat.stage, beat.label]), file=sys.stderr, flush=True)
try:
    done = kernelhub.warmup(NEEDS[:count], token_counts=[1, 8], device="cpu", verify=False, timeout_s=timeout_s,
                            jobs=jobs, progress=tell, heartbeat=tell)
    print(json.dumps(done.to_dict()), flush=True)
except LockTimeout as error:
    print(json.dumps({"timeout": str(error), "holder": error.holder}), flush=True)
"""
)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory) -> Path:
    """What the real compiler made of each source, which it need not make again for each test."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def node(tmp_path: Path, compiled_once: Path):
    """A machine with caches of its own and a compiler that does what a test says; processes that end with the test."""
    made = Node(tmp_path, compiled_once)
    yield made
    for process in made.processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


_COMPILER = """#!/bin/sh
{before}
echo $$ >> {log}
for word in "$@"; do
  case "$word" in *.cpp) source=$(basename "$word") ;; *.so) target="$word" ;; esac
done
test -e {made}/$source || {{ {real} "$@" && cp "$target" {made}/$source.$$ && mv {made}/$source.$$ {made}/$source; }}
cp {made}/$source "$target"
"""


class Node:
    def __init__(self, folder: Path, compiled: Path) -> None:
        self.folder, self.compiled, self.processes = folder, compiled, []
        names = ("KERNELHUB_CACHE_DIR", "CXX", "MAX_JOBS")
        self.environment = {name: value for name, value in os.environ.items() if name not in names}
        self.environment |= {"KERNELHUB_CACHE_DIR": str(folder / "caches"), "PYTHONPATH": str(ROOT)}
        self.log = folder / "compilations"

    def compiler(self, before: str) -> None:
        """g++ behind a script that first does something, and writes down that it compiled."""
        path = self.folder / "g++"
        real = cxx_compiler().value
        path.write_text(_COMPILER.format(before=before, log=self.log, real=real, made=self.compiled))
        path.chmod(0o755)
        self.environment["CXX"] = str(path)

    def start(self, timeout_s: float = 300, jobs: int = 1, needs: int = 2) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WARM, str(timeout_s), str(jobs), str(needs)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
        process = subprocess.Popen(command, text=True, env=self.environment, **pipes)
        self.processes.append(process)
        return process

    @property
    def compilations(self) -> int:
        return len(self.log.read_text().split()) if self.log.exists() else 0


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-2000:]
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    """Read what a process tells until it tells this."""
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"never told {words!r}")


class TestOneCompilerPerNode:
    def test_the_second_waits_for_the_first_and_takes_over_what_it_made(self, node):
        node.compiler(f"test ! -s {node.log} || until test -e {node.folder}/told; do sleep 0.05; done")
        first = node.start()
        wait_for(first, "fused_moe")
        second = node.start()
        wait_for(second, f"process {first.pid}")
        (node.folder / "told").touch()
        made, taken = told(first), told(second)
        assert made["ok"]
        assert taken["ok"]
        assert node.compilations == 2, "each library once"
        assert f"process {first.pid}" in taken["waited_for"]
        assert taken["waited_s"] > 0
        assert taken["taken_over"] == len(taken["items"])
        assert {item["how"] for item in taken["items"]} == {LOADED, DECIDED}

    def test_when_the_first_is_killed_the_second_goes_on(self, node):
        node.compiler(f"test -e {node.folder}/second || sleep 60")
        first = node.start()
        wait_for(first, "fp8_gemm")
        second = node.start()
        wait_for(second, f"process {first.pid}")
        (node.folder / "second").write_text("")
        os.kill(first.pid, signal.SIGKILL)
        answer = told(second)
        assert answer["ok"]
        assert answer["counts"][COMPILED] == 2
        assert first.wait() == -signal.SIGKILL

    def test_a_wait_that_is_too_long_names_the_holder(self, node):
        node.compiler("sleep 60")
        first = node.start()
        wait_for(first, "fp8_gemm")
        answer = told(node.start(timeout_s=1.0))
        assert f"process {first.pid}" in answer["holder"]
        assert "look at that process, and end it if it hangs" in answer["timeout"]


class TestInterrupted:
    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
    def test_what_was_done_is_taken_over(self, node, how):
        (node.folder / "slow").write_text("")
        node.compiler(f"test ! -e {node.folder}/slow || test ! -e {node.log} || sleep 60")
        first = node.start()
        wait_for(first, "fused_moe")
        time.sleep(0.5)  # in the middle of the second compilation
        first.send_signal(how)
        first.communicate(timeout=60)
        assert first.returncode == -how
        (node.folder / "slow").unlink()
        answer = told(node.start())
        assert answer["ok"]
        assert 0 < answer["taken_over"] < len(answer["items"])
        hows = {item["op"]: item["how"] for item in reversed(answer["items"])}
        assert hows == {"fp8_gemm": LOADED, "fused_moe": COMPILED}


class TestChildren:
    def test_several_compile_and_leave_it_on_disk(self, node):
        node.compiler("true")
        answer = told(node.start(jobs=2))
        assert answer["ok"]
        assert answer["jobs"] == 2
        assert answer["counts"][COMPILED] == 2
        assert node.compilations == 2
        assert answer["peak"]["children_bytes"] > 1 << 20

    def test_one_that_is_killed_for_memory_is_tried_again_alone(self, node):
        marker = node.folder / "killed"
        node.compiler(f"test -e {marker} || {{ touch {marker}; kill -9 $PPID; exit 1; }}")
        answer = told(node.start(jobs=2))
        assert answer["ok"], answer
        assert any("because memory was exhausted" in note and "tried again alone" in note for note in answer["notes"])
        assert answer["counts"][COMPILED] == 2

    def test_a_compiler_that_is_killed_again_and_again_is_named_as_such(self, node):
        node.compiler("exit 137")
        answer = told(node.start(jobs=2, needs=1))
        assert not answer["ok"]
        failed = [item for item in answer["items"] if item["how"] == FAILED]
        assert {item["op"] for item in failed} == {"fp8_gemm"}
        assert all("because memory was exhausted, alone and with one job too" in item["reason"] for item in failed)

    def test_without_children_too(self, node):
        marker = node.folder / "killed"
        node.compiler(f"test -e {marker} || {{ touch {marker}; exit 137; }}")
        answer = told(node.start(jobs=1))
        assert answer["ok"], answer
        assert any("tried again alone with one job" in note for note in answer["notes"])
        assert {item["kernel"] for item in answer["items"]} == {"cpp.fp8_gemm", "cpp.experts"}


class TestJobs:
    def test_are_as_many_as_cores_and_memory_allow(self, monkeypatch):
        monkeypatch.setattr(crew, "free_bytes", lambda: 64 << 30)
        cores = len(os.sched_getaffinity(0))
        assert crew.jobs_here(ranks=1) == min(cores, 16)
        monkeypatch.setattr(crew, "free_bytes", lambda: 3 << 30)
        assert crew.jobs_here(ranks=1) == 1
        monkeypatch.setattr(crew, "free_bytes", lambda: None)
        assert crew.jobs_here(ranks=1) == cores

    def test_are_shared_by_the_ranks_of_a_node(self, monkeypatch):
        monkeypatch.setattr(crew, "free_bytes", lambda: 64 << 30)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        assert crew.jobs_here() == 2
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
        assert crew.jobs_here() == 16

    def test_a_control_groups_limit_counts(self, monkeypatch, tmp_path):
        (tmp_path / "memory.max").write_text(str(9 << 30))
        (tmp_path / "memory.current").write_text(str(1 << 30))
        monkeypatch.setattr(crew, "_CGROUP", tmp_path)
        monkeypatch.setattr(crew, "_MEMINFO", tmp_path / "absent")
        assert crew.free_bytes() == 8 << 30

    def test_ninja_gets_as_many_unless_the_user_said(self, monkeypatch):
        seen = []
        monkeypatch.delenv("MAX_JOBS", raising=False)
        need = Need("concat_mla_k", (), ("prefill",), ())
        see = {"token_counts": (1,), "device": "cpu", "verify": False}
        kernelhub.warmup([need, lambda: seen.append(os.environ["MAX_JOBS"])], jobs=3, **see)
        assert "MAX_JOBS" not in os.environ
        monkeypatch.setenv("MAX_JOBS", "7")
        kernelhub.warmup([lambda: seen.append(os.environ["MAX_JOBS"])], jobs=3, **see)
        assert seen == ["3", "7"]
