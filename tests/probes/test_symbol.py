"""Names that a library defines, found without importing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelhub.probes.source import defines

FILES = {
    "__init__.py": "from .inner import run as run, Box as Case\nfrom .all_of import *\nraise SystemExit('imported')\n",
    "inner/__init__.py": "from ._deep import (\n  run,  # why\n  Box,\n)\nfrom os.path import join\nLIMIT: int = 3\n",
    "inner/_deep.py": "def run(): ...\nclass Box:\n    width: int = 0\n\n    def open(self): ...\n\nheight = 1\n",
    "all_of.py": "async def wait(): ...\nclass Late(\n    object,\n):\n    field = 1\n",
    "conditional.py": "if True:\n    from .inner import run\ntry:\n    from .inner import absent\nfinally:\n    pass\n",
    "round.py": "from .about import spin\n",
    "about.py": "from .round import spin\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "toy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "toy"


@pytest.mark.parametrize(
    "target",
    [
        *("toy", "toy.inner", "toy.inner._deep", "toy:inner", "toy:run", "toy:Case", "toy:wait", "toy.inner:LIMIT"),
        *("toy.inner:join", "toy.conditional:run", "toy.inner:Box.width", "toy:Case.open", "toy:Late.field"),
    ],
)
def test_it_is_there(root: Path, target: str) -> None:
    assert defines(target, root=root).ok


@pytest.mark.parametrize(
    "target",
    [
        *("toy.outer", "toy:Box", "toy:ru", "toy.inner:LIMITS", "toy.conditional:absent", "toy.inner:Box.height"),
        *("toy:Case.closed", "toy.round:spin", "toy.inner:width"),
    ],
)
def test_it_is_not(root: Path, target: str) -> None:
    finding = defines(target, root=root, remedy="update toy")
    assert (finding.ok, finding.code, finding.remedy) == (False, "symbol_missing", "update toy")
    assert target.partition(":")[0] in finding.reason


def test_a_library_that_is_not_installed() -> None:
    assert defines("no_such_library:run").code == "package_missing"


def test_a_file_that_cannot_be_read(root: Path) -> None:
    (root / "inner" / "_deep.py").write_bytes(b"\xff\xfe def run(): ...")
    assert defines("toy:run", root=root).code == "package_broken"
