"""A plugin that writes which tests inject which faults, as JSON, to the file that ``FAULTS_LIST`` names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    told = [
        {
            "test": item.nodeid,
            "file": str(item.path),
            "keys": [key for m in item.iter_markers("fault") for key in m.args],
        }
        for item in session.items
        if item.get_closest_marker("fault")
    ]
    Path(os.environ["FAULTS_LIST"]).write_text(json.dumps(told))
