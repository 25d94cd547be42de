"""Shared by the laws."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.laws import sources


@pytest.fixture(scope="package", autouse=True)
def files_are_forgotten() -> Iterator[None]:
    """The trees of all files take 170 MB."""
    yield
    sources.parsed.cache_clear()
    sources.nodes.cache_clear()
