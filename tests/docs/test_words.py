"""README and docs use plain technical English: none of the words that tests/laws refuses in code, nor those below."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.laws.test_words import BANNED

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Word or phrase of pages, as a regular expression -> what to write instead.
BANNED_IN_PAGES = BANNED | {
    r"keeps? its contract|kept its contract": "passes its contract",
    r"neither lies? nor blocks?": "validated and non-blocking",
    r"without a word": "silently",
    r"better part of": "almost",
}
_PATTERN = re.compile(rf"\b(?:{'|'.join(f'(?:{words})' for words in BANNED_IN_PAGES)})\b", re.IGNORECASE)
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_none_of_the_banned_words(page: Path) -> None:
    prose = _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code.group()), page.read_text())
    found = [
        f"line {prose.count(chr(10), 0, match.start()) + 1}: {match.group()!r}" for match in _PATTERN.finditer(prose)
    ]
    assert not found, f"{page.name}: " + "; ".join(found)
