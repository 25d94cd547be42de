"""Build sdist and wheel whose README works on a package index, where a link relative to the repository leads nowhere.

`--url` names the repository's address: relative links then lead there. Without it they become plain text, and pictures
are left out. The archives are written to dist/. The tree is that of the last commit.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!https?:|#)([^)\s]+)\)")
COMMENT = re.compile(r"<!-- .*? -->\n*")


def for_an_index(readme: str, url: str = "", branch: str = "main") -> str:
    """The README without relative links and without comments of the generator."""

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        if not url:
            return "" if picture else text
        return f"{picture}[{text}]({url.rstrip('/')}/{'raw' if picture else 'blob'}/{branch}/{target})"

    return COMMENT.sub("", LINK.sub(absolute, readme))


def extract(folder: Path, url: str) -> None:
    """The tree of the last commit, with the README that an index shows."""
    tree = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(tree)) as archive:
        archive.extractall(folder, filter="data")
    readme = folder / "README.md"
    readme.write_text(for_an_index(readme.read_text(), url))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="", help="address of the repository, without a slash at its end")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        extract(Path(folder), options.url)
        command = [sys.executable, "-m", "build", "--outdir", str(ROOT / "dist"), folder]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
