"""Groups of 2, 4 and 8 processes over gloo; other files have 3 ranks, and what goes wrong."""

from __future__ import annotations

import pytest

from tests.runtime import size_scenes
from tests.runtime.world import run_world

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_rank_gets_what_the_others_send(size, tmp_path):
    assert run_world(size, size_scenes.act, tmp_path, limit_s=120) == [{"collectives": [], "exchanges": []}] * size
