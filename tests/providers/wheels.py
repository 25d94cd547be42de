"""The Python files of a release, downloaded once per machine. Nothing of it is installed or imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
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
    wanted = ["--only-binary", ":all:", "--python-version", python]
    for tag in dict.fromkeys((platform, "manylinux2014_x86_64", "manylinux_2_34_x86_64", "linux_x86_64", "any")):
        wanted += ["--platform", tag]
    with tempfile.TemporaryDirectory() as download:
        file = _download(f"{distribution}=={version}", download, wanted)
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


def sources(distribution: str, version: str, **environment: str) -> Path:
    """Folder with the Python files of a release that is source only; `environment` keeps it from being compiled.

    Skips the test where it cannot be downloaded.
    """
    folder = _cache() / f"{distribution}-{version}"
    if (folder / ".complete").is_file():
        return folder
    with tempfile.TemporaryDirectory() as download:
        wanted = ["--no-binary", ":all:", "--no-build-isolation"]
        file = _download(f"{distribution}=={version}", download, wanted, environment)
        with tarfile.open(file) as archive:
            for item in archive.getmembers():
                path = folder / item.name.partition("/")[2]
                if item.isfile() and item.name.endswith(".py") and path.resolve().is_relative_to(folder.resolve()):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(archive.extractfile(item).read())  # type: ignore[union-attr]
    (folder / ".complete").touch()
    return folder


def _download(what: str, folder: str, wanted: list[str], environment: Mapping[str, str] | None = None) -> Path:
    """One file of the index; skips the test where it is not to be had."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--dest", folder, *wanted, what]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, env={**os.environ, **(environment or {})}
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{what} did not download within {_TIMEOUT_S:g} s")
    if done.returncode:
        pytest.skip(f"{what} could not be downloaded: {done.stderr.strip()[-300:]}")
    (file,) = (path for path in Path(folder).iterdir() if path.suffix in (".whl", ".gz"))
    return file


def _cache() -> Path:
    given = os.environ.get("WHEELS_FOR_TESTS")  # not KERNELHUB_*: tests clear those
    return Path(given) if given else Path.home() / ".cache" / "kernelhub-tests"
