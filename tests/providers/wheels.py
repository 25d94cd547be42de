"""The Python files of a released wheel, downloaded once per machine. Nothing of it is installed or imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

_TIMEOUT_S = 300.0


def wheel(distribution: str, version: str, *, python: str = "3.12", platform: str = "manylinux_2_28_x86_64") -> Path:
    """Folder with the Python files of a wheel; of its other files only empty ones, so that names can be looked for.

    Skips the test where the wheel cannot be downloaded.
    """
    folder = _cache() / f"{distribution}-{version}"
    if (folder / ".complete").is_file():
        return folder
    with tempfile.TemporaryDirectory() as download:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary", ":all:", "--python-version", python, "--dest", download]
        for tag in dict.fromkeys((platform, "manylinux2014_x86_64", "manylinux_2_34_x86_64", "linux_x86_64", "any")):
            command += ["--platform", tag]
        try:
            done = subprocess.run(
                [*command, f"{distribution}=={version}"], capture_output=True, text=True, timeout=_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"{distribution} {version} did not download within {_TIMEOUT_S:g} s")
        if done.returncode:
            pytest.skip(f"{distribution} {version} could not be downloaded: {done.stderr.strip()[-300:]}")
        (file,) = Path(download).glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                path = folder / name
                if name.endswith("/") or not path.resolve().is_relative_to(folder.resolve()):
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(name) if name.endswith((".py", "METADATA", ".pyi")) else b"")
    (folder / ".complete").touch()
    return folder


def _cache() -> Path:
    given = os.environ.get("WHEELS_FOR_TESTS")  # not KERNELHUB_*: tests clear those
    return Path(given) if given else Path.home() / ".cache" / "kernelhub-tests"
