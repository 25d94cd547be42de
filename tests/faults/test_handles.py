"""FX4: temporary folders and containers in which processes cannot pass each other handles of memory."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from kernelhub.cli.link_facts import handles as shown
from kernelhub.probes import handle_child, handles
from kernelhub.probes.handles import HANDLES_TIMEOUT_S, handle_folder, probe_handles
from tests.faults.records import FAULTS
from tests.faults.scene import code_is


@pytest.fixture(autouse=True)
def anew():
    """The probe runs again, and what it found with a fault is forgotten."""
    handles._probed.cache_clear()
    yield
    handles._probed.cache_clear()


def check(key: str, found: handles.Handles) -> None:
    """The finding has the code of the fault, `doctor` shows it, and nothing stays behind."""
    code_is(FAULTS[key], found.sending)
    assert FAULTS[key].remedy == found.sending.remedy
    fact, _ = shown(found)
    assert (fact.status, FAULTS[key].code in fact.what) == ("note", True)
    assert "collectives use NCCL" in fact.meaning


def test_processes_of_this_machine_pass_descriptors(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = probe_handles()
    assert (found.folder, found.sending.ok) == (str(tmp_path), True), found
    assert next(iter(shown(found))).status == "ok"
    assert not list(tmp_path.iterdir())


def test_the_folder_is_that_of_torch(monkeypatch) -> None:
    for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"):
        monkeypatch.delenv(name, raising=False)
    assert handle_folder() == "/tmp"
    monkeypatch.setenv("TEMP", "/b")
    monkeypatch.setenv("TMP", "/a")
    assert handle_folder() == "/a"


@pytest.mark.fault("socket_folder")
@pytest.mark.parametrize("kind", ["missing", "file", "no sockets"])
def test_a_folder_without_sockets(kind, tmp_path, monkeypatch) -> None:
    file = tmp_path / "file"
    file.touch()
    place = {"missing": tmp_path / "missing", "file": file, "no sockets": Path("/proc/self")}[kind]
    monkeypatch.setenv("TMPDIR", str(place))
    check("socket_folder", probe_handles())


@pytest.mark.fault("socket_path")
def test_a_folder_with_a_long_path(tmp_path, monkeypatch) -> None:
    place = tmp_path / ("long" * 30)
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    check("socket_path", probe_handles())


@pytest.mark.fault("descriptor_refused")
def test_a_socket_through_which_nothing_comes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(handle_child, "_send", lambda name: 0)
    monkeypatch.setattr(handle_child, "_WAIT_S", 0.1)
    code, why = handle_child.sent(str(tmp_path))
    assert (code, "did not come" in why) == (FAULTS["descriptor_refused"].code, True)
    assert not list(tmp_path.iterdir())
    answer = f'print(\'{{"code": "{code}", "why": "{why}", "taking": ""}}\')'
    monkeypatch.setattr(handles, "_CHILD", script(tmp_path, answer))
    check("descriptor_refused", probe_handles())


@pytest.mark.fault("handle_probe_hangs")
def test_a_probe_that_does_not_end(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(handles, "_CHILD", script(tmp_path, "import time; time.sleep(60)"))
    check("handle_probe_hangs", probe_handles(timeout_s=0.2))


@pytest.mark.fault("handle_probe_fails")
@pytest.mark.parametrize("text", ["raise SystemExit(1)", "print('[]')", "print('{}')"])
def test_a_probe_that_fails(text, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(handles, "_CHILD", script(tmp_path, text))
    check("handle_probe_fails", probe_handles())


@pytest.mark.fault("handle_probe_fails")
def test_an_interpreter_that_is_gone(monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    check("handle_probe_fails", probe_handles())


@pytest.mark.fault("ptrace_refused")
def test_a_descriptor_that_may_not_be_taken(tmp_path, monkeypatch) -> None:
    answer = f"""print('{{"code": "", "why": "", "taking": "{os.strerror(errno.EPERM)}"}}')"""
    monkeypatch.setattr(handles, "_CHILD", script(tmp_path, answer))
    found = probe_handles(HANDLES_TIMEOUT_S)
    code_is(FAULTS["ptrace_refused"], found.taking)
    sending, taking = shown(found)
    assert (sending.status, taking.status, "ptrace_refused" in taking.what) == ("ok", "note", True)


def script(folder: Path, text: str) -> str:
    """A child process that does something else."""
    path = folder / "child.py"
    path.write_text(text)
    return str(path)
