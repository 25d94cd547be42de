"""What examples verify is kept in a folder of the test, not in that of whoever runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelhub.runtime.caches.root import Place


@pytest.fixture(autouse=True)
def evidence_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelhub.evidence.store.places", lambda: (Place(tmp_path, "test"),))
