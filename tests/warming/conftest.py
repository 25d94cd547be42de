"""Each test has caches of its own, so that it sees what is compiled; what is loaded of our libraries is forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelhub.backends.cpp import build
from kernelhub.evidence import quarantine, store
from kernelhub.runtime.caches import notices


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "caches"
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(folder))
    build.library.cache_clear()
    notices.forget()
    yield folder
    build.library.cache_clear()
    store.forget_unwritten()
    quarantine.say.cache_clear()
    notices.forget()
