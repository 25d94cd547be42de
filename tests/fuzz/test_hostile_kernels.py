"""Kernels that crash, hang, leave, raise, print or lie: verification survives, and the next process chooses none."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.evidence import checks, validity, verify
from tests.dispatch.backends import qkv
from tests.fuzz.hostile_kernels import ACTS, GATE, install, told

ROOT = Path(__file__).parents[2]
_CHOOSE = """
import json, kernelhub
from tests.dispatch.backends import qkv
selection = kernelhub.attention.explain(*qkv())
print(json.dumps([selection.selected, {item.kernel: [item.code, item.reason] for item in selection.decisions}]))
"""
_VERIFY_HERE = """
import kernelhub, hostile_kernels_plugin
kernelhub.register_backend(hostile_kernels_plugin)
kernelhub.verify("attention", backend="hostile", device="cpu", quick=True)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder for packages, also of processes that are started."""
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.syspath_prepend(str(tmp_path))
    validity._digest_of_sources.cache_clear()  # each test has another module of that name
    yield tmp_path
    for name in ("hostile_kernels_plugin", "hostile_acts"):
        sys.modules.pop(name, None)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_each_is_recorded_and_the_next_process_chooses_none_that_is_not_right(site, monkeypatch, capsys) -> None:
    install(site, GATE)
    results = {}
    for timeout_s, names in (("1", ("hang",)), ("60", GATE[1:])):
        monkeypatch.setenv("KERNELHUB_VERIFY_TIMEOUT_S", timeout_s)
        kernelhub.reload()
        found = kernelhub.verify("attention", backend=[f"hostile.{name}" for name in names], device="cpu", quick=True)
        results |= {result.kernel.partition(".")[2]: result for result in found.results}
    with capsys.disabled():
        print(f"\n{told(found)}")
    assert {name: result.code for name, result in results.items()} == {name: ACTS[name][1] for name in GATE}
    assert "SIGSEGV" in results["segfault"].reason
    assert "exit code 0" in results["leave"].reason
    assert "KERNELHUB_VERIFY_TIMEOUT_S" in results["hang"].reason
    selected, decisions = json.loads(python(_CHOOSE).stdout)
    right = {f"hostile.{name}" for name in GATE if ACTS[name][1] == "ok"}
    assert selected in right
    for name in GATE:
        code, reason = decisions[f"hostile.{name}"]
        assert (code == "quarantined") == (ACTS[name][1] != "ok"), (name, code, reason)


class TestInThisProcess:
    """A kernel that is registered at run time is in no other process: what it does is written down before."""

    def test_one_that_crashes_is_quarantined_in_the_next_process(self, site) -> None:
        install(site, ["segfault"], listed=False)
        assert python(_VERIFY_HERE).returncode == -11
        register()
        selection = kernelhub.attention.explain(*qkv())
        decision = next(item for item in selection.decisions if item.kernel == "hostile.segfault")
        assert decision.code == "quarantined"
        assert "ended while it verified the kernel" in decision.reason
        assert selection.selected != "hostile.segfault"

    def test_system_exit_does_not_escape(self, site) -> None:
        install(site, ["exit"], listed=False)
        register()
        (result,) = kernelhub.verify("attention", backend="hostile", device="cpu", quick=True).results
        assert result.code == "crashed"
        assert "SystemExit(0)" in result.reason

    @pytest.mark.parametrize("apart", [None, True, False])
    def test_one_that_hangs_does_not_hang_who_verifies(self, site, monkeypatch, apart) -> None:
        monkeypatch.setenv("KERNELHUB_VERIFY_TIMEOUT_S", "1")
        install(site, ["hang", "read", "print"], listed=False)
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        kernelhub.reload()
        register()
        begun = time.monotonic()
        results = kernelhub.verify("attention", backend="hostile", device="cpu", quick=True, apart=apart).results
        codes = {result.kernel.partition(".")[2]: result.code for result in results}
        assert codes == {"hang": "hung", "read": "ok", "print": "ok"}
        (hung,) = [result for result in results if result.code == "hung"]
        assert "KERNELHUB_VERIFY_TIMEOUT_S" in hung.reason
        assert time.monotonic() - begun < 30
        HUB.forget_evidence()
        decisions = {item.kernel: item.code for item in kernelhub.attention.explain(*qkv()).decisions}
        assert decisions["hostile.hang"] == "quarantined"

    def test_ctrl_c_speaks_against_no_kernel(self, site) -> None:
        install(site, ["interrupt"], listed=False)
        register()
        with pytest.raises(KeyboardInterrupt):
            kernelhub.verify("attention", backend="hostile", device="cpu", quick=True)
        HUB.forget_evidence()
        assert kernelhub.attention.explain(*qkv()).selected == "hostile.interrupt"


@pytest.mark.parametrize(("apart", "same"), [(None, True), (True, False), (False, True)])
def test_kernels_of_ours_are_asked_where_it_is_said(site, monkeypatch, apart, same) -> None:
    asked = []
    here = checks.Subject.check
    monkeypatch.setattr(checks.Subject, "check", lambda self, case: asked.append(case.label) or here(self, case))
    found = kernelhub.verify("merge_attention_states", backend="torch", device="cpu", quick=True, apart=apart)
    assert found.ok
    assert bool(asked) is same


def test_a_gpu_that_a_kernel_holds_is_not_asked_again_in_this_process(site, monkeypatch) -> None:
    """As the results say; a device that is no CPU is made of the CPU here."""
    monkeypatch.setenv("KERNELHUB_VERIFY_TIMEOUT_S", "1")
    install(site, ["hang", "print"], listed=False)
    kernelhub.reload()
    register()
    real = verify.device_here

    class Device:
        type, index = "meta", 0

    monkeypatch.setattr(verify, "_subjects", lambda *a, of=verify._subjects: of(*a[:2], real("cpu")))
    monkeypatch.setattr(verify, "facts", lambda device, of=verify.facts: of(real("cpu")))
    monkeypatch.setattr(verify, "device_here", lambda device: Device())
    hung, other = kernelhub.verify("attention", backend="hostile", quick=True).results
    assert (hung.code, other.why_not) == (
        "hung",
        f"{hung.kernel} hangs on the device in this process; restart it, or give apart=True",
    )


def test_warm_up_survives_a_kernel_that_crashes_and_takes_the_next(site, monkeypatch) -> None:
    install(site, ["leave"])
    kernelhub.reload()
    selection = kernelhub.attention.explain(*qkv(4, 64))
    assert selection.selected == "hostile.leave"
    done = kernelhub.warmup(selection, token_counts=[4], device="cpu", context_len=8, max_context_len=16)
    assert done.ok
    assert [(op, kernel) for op, kernel, _ in done.quarantined] == [("attention", "hostile.leave")]
    assert {item.kernel for item in done.items} & {"hostile.leave"} == set()


def register() -> None:
    import hostile_kernels_plugin  # type: ignore[import-not-found]

    kernelhub.register_backend(hostile_kernels_plugin)
