"""The command line in this process and in one of its own; a machine with a GPU and plugins that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernelhub.cli.main import main
from kernelhub.probes.device import facts
from kernelhub.runtime.caches.store import Documents


@dataclass(frozen=True)
class Answer:
    """What a user sees of one command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def row(self, word: str) -> str:
        """The line of output that begins with a word."""
        return next(line for line in self.out.splitlines() if line.split()[:1] == [word])


Ask = Callable[..., Answer]


@pytest.fixture(autouse=True)
def evidence_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command verifies is kept in a folder of the test, and what was verified on this machine is not heeded."""
    monkeypatch.setattr(
        "kernelhub.evidence.store.documents", lambda made_for: Documents("evidence", made_for, tmp_path / "cache")
    )
    monkeypatch.setattr("kernelhub.evidence.store.is_empty", lambda architecture: False)


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run ``kernelhub WORDS`` in this process."""

    def run(*words: str) -> Answer:
        code = main(words)
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return run


@pytest.fixture
def ask_shell(tmp_path: Path) -> Ask:
    """Run ``python -m kernelhub WORDS`` as a shell would, its output into pipes."""

    def run(*words: str, env: Mapping[str, str] | None = None, before: str = "") -> Answer:
        start = ["-m", "kernelhub"]
        if before:
            code = f"import sys; {before}; from kernelhub.cli.main import main; sys.exit(main(sys.argv[1:]))"
            start = ["-c", code]
        done = subprocess.run(
            [sys.executable, *start, *words],
            capture_output=True,
            text=True,
            timeout=120,
            env={**_environment(), **(env or {})},
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch):
    """torch sees one H200."""
    properties = SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        shared_memory_per_block_optin=232448,
        total_memory=141 * 2**30,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    facts.cache_clear()
    yield
    facts.cache_clear()


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is not installed."""
    monkeypatch.setitem(sys.modules, "triton", None)


@pytest.fixture
def broken_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed plugin whose import fails; gives its name."""
    info = tmp_path / "sunken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sunken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kernelhub.backends]\nsunken = sunken_kernels\n")
    (tmp_path / "sunken_kernels.py").write_text("raise OSError('libsunken.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "sunken"


def _environment() -> dict[str, str]:
    """This process's, without what tests set for themselves."""
    return {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")}
