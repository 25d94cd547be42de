"""Results of tests go to a folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelhub.evidence import quarantine, store


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(folder))
    yield folder
    store.forget_unwritten()
    quarantine.say.cache_clear()
