"""What pyproject.toml cannot say of the build: a wheel carries the sources of csrc/, which lie beside the package."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SOURCES = ("*.cpp", "*.h", "*.c", "*.cu")


class BuildPy(build_py):
    """Copies csrc/ into the package; an editable install reads it where it is."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._shipped():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        shipped = [] if self.editable_mode else [str(target) for _, target in self._shipped()]
        return [*super().get_outputs(include_bytecode), *shipped]

    def _shipped(self) -> list[tuple[Path, Path]]:
        sources = sorted(path for pattern in SOURCES for path in (ROOT / "csrc").rglob(pattern))
        return [(path, Path(self.build_lib) / "kernelhub" / path.relative_to(ROOT)) for path in sources]


setup(cmdclass={"build_py": BuildPy})
