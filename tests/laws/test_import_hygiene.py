"""`import kernelhub` is light and harmless, on any machine (DESIGN, third law)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RECORDER = """
import builtins, json, os, socket, subprocess, sys
import torch
events = []
def note(what):
    def wrapper(*args, **kwargs):
        events.append(what)
        raise RuntimeError(what)
    return wrapper
asked = "_lazy_init is_available device_count get_device_capability get_device_properties current_device"
for name in asked.split():
    setattr(torch.cuda, name, note("torch.cuda." + name))
subprocess.Popen.__init__ = note("subprocess")
os.system = note("os.system")
socket.socket.__init__ = note("socket")
real_open = builtins.open
def watched_open(file, mode="r", *args, **kwargs):
    if any(letter in mode for letter in "wax+"):
        events.append(f"open({file}, {mode})")
    return real_open(file, mode, *args, **kwargs)
builtins.open = watched_open
environment, folder, before = dict(os.environ), os.getcwd(), set(sys.modules)
for action in ("import kernelhub", *json.loads(sys.argv[1])):
    exec(action)
    print(json.dumps({
        "events": events,
        "environment_changed": dict(os.environ) != environment or os.getcwd() != folder,
        "modules": sorted(set(sys.modules) - before),
        "threads": __import__("threading").active_count(),
    }))
"""


def clean() -> dict[str, str]:
    """The environment without settings of ours and Triton's."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("KERNELHUB_", "TRITON_"))}


def record(*actions: str, **environment: str) -> list[dict[str, Any]]:
    """What a fresh process had seen once it had imported kernelhub, and after each action."""
    command = [sys.executable, "-c", RECORDER, json.dumps(actions)]
    answer = subprocess.run(command, capture_output=True, text=True, env=clean() | environment, timeout=120)
    assert answer.returncode == 0, answer.stderr
    return [json.loads(line) for line in answer.stdout.splitlines()]


HEAVY = ("triton", "flashinfer", "deep_gemm", "torch._dynamo", "torch._inductor", "transformers", "rich", "hypothesis")


def heavy(seen: dict[str, Any]) -> list[str]:
    return [name for name in seen["modules"] if name.split(".")[0] in HEAVY or name.startswith(HEAVY)]


@pytest.mark.fault("cuda_that_explodes")
def test_importing_looking_at_every_name_and_explaining_touch_nothing_and_load_nothing_heavy() -> None:
    looking = "[getattr(kernelhub, name) for name in kernelhub.__all__]"
    imported, looked, explained = record(looking, "kernelhub.explain('paged_attention', device='B200')")
    assert [name for name in imported["modules"] if name.startswith("kernelhub")] == ["kernelhub", "kernelhub.homes"]
    assert not imported["environment_changed"]
    for seen in (imported, looked):
        assert seen["threads"] == 1
    for seen in (imported, looked, explained):
        assert seen["events"] == []
        assert heavy(seen) == []


@pytest.mark.fault("cuda_that_explodes")
def test_a_call_on_the_cpu_asks_no_gpu_and_imports_no_triton() -> None:
    call = "q = torch.zeros(1, 4, 2, 16); kernelhub.attention(q, q, q, causal=True)"
    # The first call on a machine starts a C++ compiler.
    subprocess.run([sys.executable, "-c", f"import torch, kernelhub; {call}"], check=True, env=clean(), timeout=300)
    *_, seen = record(call)
    assert seen["events"] == []
    assert heavy(seen) == []


def test_it_works_without_a_home_and_with_an_unwritable_one(tmp_path: Path) -> None:
    # By torch: kernels of csrc/cpu may have to be compiled.
    call = "q = torch.zeros(1, 32, 2, 16); kernelhub.attention(q, q, q, backend='torch')"
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    for home in ("/nonexistent", str(locked), ""):
        assert record(call, HOME=home, XDG_CACHE_HOME="")[-1]["events"] == []


def test_a_wrong_variable_does_not_break_the_import_only_the_first_decision() -> None:
    code = (
        "import kernelhub, torch\n"
        "q = torch.zeros(1, 4, 2, 16)\n"
        "try: kernelhub.attention(q, q, q)\n"
        "except kernelhub.errors.ConfigurationError as error: print(error)\n"
    )
    environment = os.environ | {"KERNELHUB_DISABEL": "torch"}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert "unknown variable KERNELHUB_DISABEL (did you mean KERNELHUB_DISABLE?)" in answer.stdout


@pytest.mark.fault("fork_after_import")
def test_a_process_may_fork_after_the_import_and_after_a_call() -> None:
    code = """
import os, torch, kernelhub
torch.set_num_threads(1)
q = torch.randn(1, 4, 2, 16)
want = kernelhub.attention(q, q, q)
children = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        same = torch.equal(kernelhub.attention(q, q, q), want)
        new = kernelhub.attention(q.double().float(), q, q, causal=True).shape == q.shape
        os._exit(0 if same and new else 1)
    children.append(child)
print(sum(os.waitpid(child, 0)[1] for child in children))
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert answer.stdout.strip() == "0", answer.stderr
