"""Every code is said somewhere, explained, and said once."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

import kernelhub
from kernelhub.runtime.caches import notices
from kernelhub.runtime.caches.notices import CODES, say
from kernelhub.runtime.caches.root import PLACE_ERRORS

ROOT = Path(kernelhub.__file__).parents[1]


def test_every_code_is_used_and_none_is_unknown() -> None:
    sources = [path for path in (ROOT / "kernelhub" / "runtime" / "caches").glob("*.py") if path.name != "notices.py"]
    words = {word for path in sources for word in re.findall(r'"([a-z]+_[a-z_]+)"', path.read_text())}
    used = {word for word in words if word.split("_")[0] in ("cache", "manifest", "file", "entry", "lock")}
    assert used == set(CODES)
    assert set(PLACE_ERRORS.values()) <= set(CODES)


def test_the_page_explains_every_code_in_the_same_words() -> None:
    page = (ROOT / "docs" / "caches.md").read_text()
    for code, (meaning, remedy) in CODES.items():
        assert f"| `{code}` | {meaning} | {remedy} |" in page


def test_every_code_has_a_test_that_names_it() -> None:
    folder = Path(__file__).parent
    text = "".join(path.read_text() for path in folder.glob("test_cache_*.py") if path != Path(__file__))
    assert {code for code in CODES if f'"{code}"' not in text} == set()


def test_the_same_is_said_once_also_by_many_threads(caplog) -> None:
    notices.forget()
    with caplog.at_level(logging.WARNING, logger="kernelhub.caches"):
        threads = [threading.Thread(target=say, args=("cache_full", "/x", "no space in /x")) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        say("cache_full", "/y", "no space in /y")
    assert [notice.subject for notice in kernelhub.cache_notices()] == ["/x", "/y"]
    assert len(caplog.records) == 2
    assert "no space in /x; free space" in caplog.text
    notices.forget()
    assert kernelhub.cache_notices() == ()
