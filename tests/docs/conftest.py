"""Results of examples are stored in a folder of the test, not in the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelhub.runtime.caches.store import Documents


@pytest.fixture(autouse=True)
def evidence_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kernelhub.evidence.store.documents", lambda made_for: Documents("evidence", made_for, tmp_path)
    )
    monkeypatch.setattr("kernelhub.evidence.store.is_empty", lambda architecture: False)
