"""The compiled parts of a wheel, which pyproject.toml cannot describe: csrc/README.md says what is built from what.

A wheel carries the sources of csrc/ and what was compiled of them. An editable install compiles nothing: kernels are
compiled at first use, from the sources where they are. Without a C++ compiler that compiles them all a wheel carries no
compiled kernels, unless KERNELHUB_REQUIRE_COMPILED=1 makes that an error.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SOURCES = ("*.cpp", "*.h", "*.c", "*.cu")
CPU = "kernelhub._cpu"  # stands for the libraries of csrc/cpu, which Python does not import
MACHINE = sysconfig.get_platform().rpartition("-")[2]  # that of the wheel, which may not be this one's
EXPORTED = ROOT / "csrc" / "cpu" / "exported.map"
REQUIRED = os.environ.get("KERNELHUB_REQUIRE_COMPILED") == "1"

# By the answer of kernelhub_cpu_level(): what a library's name ends in, and the instructions that it may use.
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, *(f"-mavx512{name}" for name in ("f", "bw", "vl", "dq", "cd")))
LEVELS: dict[str, tuple[str, ...]] = {"base": ()}
if MACHINE == "x86_64":
    LEVELS |= {"avx2": _AVX2, "avx512": _AVX512, "avx512bf16": (*_AVX512, "-mavx512bf16", "-mavx512vbmi")}


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


class BuildExt(build_ext):
    """Compiles csrc/; nothing for an editable install."""

    def run(self) -> None:
        if not self.editable_mode:
            super().run()

    def build_extension(self, ext: Any) -> None:
        if ext.name != CPU:
            super().build_extension(ext)
            return
        compiler = _compiler()
        if compiler is None:
            if REQUIRED:
                raise SystemExit("KERNELHUB_REQUIRE_COMPILED=1, but neither g++ nor clang++ is on PATH; set CXX")
            print("no C++ compiler: kernels for CPUs will be compiled at first use", file=sys.stderr)
            return
        folder = Path(self.build_lib) / "kernelhub" / "csrc" / "cpu"
        folder.mkdir(parents=True, exist_ok=True)
        for level, flags in LEVELS.items():
            sources = sorted(str(path) for path in (ROOT / "csrc" / "cpu").glob("*.cpp"))
            library = folder / f"libkernelhub_{level}.so"
            command = [*compiler, "-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", *flags, *sources, *_linked()]
            if subprocess.run([*command, "-o", str(library)], check=REQUIRED).returncode:
                print(f"{library.name} was not compiled: kernels will be compiled at first use", file=sys.stderr)
                for made in folder.glob("libkernelhub_*.so"):
                    made.unlink()
                return

    def get_outputs(self) -> list[str]:
        return [] if self.editable_mode else [path for path in super().get_outputs() if Path(path).exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {} if self.editable_mode else super().get_output_mapping()


class BdistWheel(bdist_wheel):
    """One wheel for every Python from 3.10 on: modules have the stable ABI, libraries no ABI of Python's at all."""

    def finalize_options(self) -> None:
        self.py_limited_api = "cp310"
        super().finalize_options()


def _compiler() -> list[str] | None:
    named = os.environ.get("CXX", "").split()
    for command in [named] if named else [["g++"], ["clang++"], ["c++"]]:
        if shutil.which(command[0]):
            return command
    return None


def _linked() -> tuple[str, ...]:
    """The C++ library is part of each library, unseen, so that any Linux of the C library's age runs them."""
    if platform.system() != "Linux":
        return ()
    hidden = f"-Wl,--version-script={EXPORTED}"
    return ("-static-libstdc++", "-static-libgcc", hidden, "-Wl,--gc-sections", "-s", "-ldl")


EXTENSIONS = [
    Extension(
        "kernelhub._launch",
        ["csrc/launch/launch.c"],
        depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / "launch").glob("*.h")),
        py_limited_api=True,
        optional=not REQUIRED,
    ),
    Extension(CPU, []),
]

if __name__ == "__main__":
    setup(
        ext_modules=EXTENSIONS if platform.system() in ("Linux", "Darwin") else [],
        cmdclass={"build_py": BuildPy, "build_ext": BuildExt, "bdist_wheel": BdistWheel},
    )
