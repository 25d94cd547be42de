"""Installed distributions are told apart: a broken one is named, and no other notices."""

from __future__ import annotations

import os
import sys
import time
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernelhub.probes import distributions
from kernelhub.probes.package import package
from kernelhub.probes.source import defines

GOOD = "Metadata-Version: 2.1\nName: Good-Thing\nVersion: 2.5\nSummary: a\n  summary\n\nVersion: 9\n"
HUGE_BYTES = 200 << 20


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages folder of its own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, folder: str, **files: str | bytes) -> Path:
    """A distribution's folder."""
    info = site / folder
    info.mkdir()
    for name, content in files.items():
        path = info / (name if name.isupper() else f"{name}.txt")
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return info


def named(name: str) -> list[str]:
    """What is wrong with distributions of that name."""
    return [finding.reason for finding in distributions.broken() if finding.subject == name]


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, HUGE_BYTES)


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def test_installed_packages_are_reported_as_by_importlib() -> None:
    by_package = metadata.packages_distributions()
    for name in ("torch", "packaging", "pytest", "yaml"):
        if name in by_package:
            assert {item.name for item in distributions.distributions_of(name)} == set(by_package[name])
    assert distributions.version_of("torch") == metadata.version("torch")
    assert distributions.version_of("nowhere-to-be-found") is None


def test_headers_end_where_the_description_begins(site: Path) -> None:
    install(site, "good_thing-2.5.dist-info", METADATA=GOOD, top_level="good\n")
    found = distributions.distribution("good.thing")
    assert found is not None
    assert (found.name, found.version) == ("Good-Thing", "2.5")
    assert found.header("summary") == "a\nsummary"
    assert [item.name for item in distributions.distributions_of("good")] == ["Good-Thing"]
    assert not named("good-thing")


def test_of_two_with_one_name_the_first_on_the_path_counts(site: Path, monkeypatch) -> None:
    for version in ("1.0", "2.0"):
        folder = site / version
        folder.mkdir()
        install(folder, f"twice-{version}.dist-info", METADATA=f"Name: twice\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(folder))
    assert distributions.version_of("twice") == "2.0"


def test_one_in_a_zip_file_is_read(site: Path, monkeypatch) -> None:
    with zipfile.ZipFile(site / "thing.zip", "w") as archive:
        archive.writestr("good_thing-2.5.dist-info/METADATA", GOOD)
    monkeypatch.syspath_prepend(str(site / "thing.zip"))
    assert distributions.version_of("good-thing") == "2.5"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "has no name and no version"),
        ({"METADATA": "Version: 1.0\n"}, "has no name"),
        ({"METADATA": "Name: x\nVersion: 1\n", "top_level": b"caf\xe9\n"}, "is not UTF-8"),
    ],
)
def test_a_broken_one_is_named_with_the_reason(site: Path, files: dict, reason: str) -> None:
    install(site, "broken_thing-1.0.dist-info", **files)
    (told,) = named("broken-thing")
    assert reason in told
    assert distributions.version_of("torch") == metadata.version("torch")


@pytest.mark.parametrize("make", [huge, os.mkfifo, zero])
@pytest.mark.parametrize("file", ["METADATA", "top_level.txt", "entry_points.txt", "RECORD"])
def test_what_is_no_text_costs_milliseconds(site: Path, make: Callable[[Path], None], file: str) -> None:
    make(install(site, "big_thing-1.0.dist-info") / file)
    begun = time.perf_counter()
    assert distributions.version_of("big-thing") is None
    assert distributions.distributions_of("torch")
    assert "big_thing" not in {entry.name for entry in distributions.entry_points("kernelhub.backends")[0]}
    assert named("big-thing")
    assert time.perf_counter() - begun < 1.0


@pytest.mark.parametrize("make", [huge, os.mkfifo])
def test_a_package_whose_source_is_no_text_defines_nothing(site: Path, make: Callable[[Path], None]) -> None:
    (site / "big_thing").mkdir()
    make(site / "big_thing" / "__init__.py")
    begun = time.perf_counter()
    assert defines("big_thing:run").code in ("package_broken", "symbol_missing")
    assert time.perf_counter() - begun < 1.0


def test_a_finder_of_foreign_code_that_raises_finds_nothing(monkeypatch) -> None:
    def raises(context: object) -> None:
        raise RuntimeError("broken finder")

    version = metadata.version("torch")
    finder = SimpleNamespace(find_distributions=raises, find_spec=lambda *arguments: None)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert distributions.version_of("torch") == version


def test_a_finder_that_raises_is_named_and_doctor_shows_it(monkeypatch) -> None:
    from kernelhub.cli import machine_facts

    class Crooked:
        def find_spec(self, *arguments: object) -> None: ...

        def find_distributions(self, context: object) -> list[object]:
            raise RuntimeError("a\nlong story")

    before = len(distributions.installed())
    monkeypatch.setattr(sys, "meta_path", [Crooked(), *sys.meta_path])
    assert len(distributions.installed()) == before
    (told,) = [finding for finding in distributions.broken() if "Crooked" in finding.reason]
    assert told.code == "metadata_broken"
    assert "RuntimeError" in told.reason
    assert told.remedy
    assert any("Crooked" in fact.what for fact in machine_facts.broken_distributions())


def test_a_version_of_a_hundred_thousand_digits_is_none(site: Path) -> None:
    install(site, "long_thing-1.0.dist-info", METADATA=f"Name: x\nVersion: {'9' * 100_000}\n")
    (site / "long_thing.py").write_text("")
    assert package("long_thing", ">=1", distribution="long-thing").code == "package_version"
