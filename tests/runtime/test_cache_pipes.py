"""A pipe in the place of a file, which anybody may put into a shared folder, keeps nobody waiting: it is a miss."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kernelhub.runtime.caches import known
from kernelhub.runtime.caches.fingerprint import fingerprint
from kernelhub.runtime.caches.lock import lock
from kernelhub.runtime.caches.store import Store

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here: 4 cases")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store("nvrtc", fingerprint("sm_90a"), folder=tmp_path)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["manifest.json", "kernel.cubin"])
def test_an_entry_is_made_again(store, name) -> None:
    made = store.get("kernel", lambda folder: (folder / "kernel.cubin").write_text("made"))
    pipe(made.path / name)
    assert store.find("kernel") is None
    again = store.get("kernel", lambda folder: (folder / "kernel.cubin").write_text("made again"))
    assert again.file("kernel.cubin").read_text() == "made again"


def test_a_lock_is_taken_over_once_it_shows_no_life(tmp_path) -> None:
    path = tmp_path / "entry.lock"
    os.mkfifo(path)
    os.utime(path, (time.time() - 300,) * 2)
    with lock(path, timeout_s=10) as held:
        assert held.still()


def test_what_a_library_keeps_is_broken(tmp_path) -> None:
    folder = tmp_path / ("A" * 52)
    folder.mkdir()
    os.mkfifo(folder / "kernel.json")
    triton = next(item for item in known.KNOWN if item.name == "triton").read({"TRITON_CACHE_DIR": str(tmp_path)})
    assert triton is not None
    assert [(item.state, item.reason) for item in triton.items] == [("broken", "kernel.json is not JSON")]
