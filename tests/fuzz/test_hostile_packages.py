"""Hostile and broken packages beside kernelhub: no command, no probe and no call notices more than their names."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

import kernelhub
from kernelhub.cli.main import main
from kernelhub.probes import distributions
from kernelhub.probes.finding import Finding
from kernelhub.probes.package import package
from kernelhub.probes.signature import Call, takes
from kernelhub.probes.source import defines
from tests.dispatch.backends import qkv
from tests.fuzz.hostile_packages import make_site

PACKAGES = 40
PROBE_S = 2.0  # a probe takes milliseconds; this is what a busy machine may make of them
SEEDS = range(2)


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is imported from a test's site folder is forgotten afterwards."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "pytest-" in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_probe_raises_or_takes_long(tmp_path: Path, monkeypatch, capsys, forgotten, seed: int) -> None:
    names = make_site(tmp_path, Random(seed), PACKAGES)
    monkeypatch.syspath_prepend(str(tmp_path))
    slowest, asked = ("", 0.0), 0
    for name in names:
        for probe in (
            lambda name=name: package(name, ">=1.0"),
            lambda name=name: defines(f"{name}:run"),
            lambda name=name: defines(f"{name}:Box.field"),
            lambda name=name: takes(Call(f"{name}:run", ("a",))),
            lambda name=name: takes(Call(f"{name}.inner:Box.run", ("a",))),
        ):
            begun = time.perf_counter()
            assert isinstance(probe(), Finding)
            taken, asked = time.perf_counter() - begun, asked + 1
            slowest = max(slowest, (name, taken), key=lambda item: item[1])
    assert slowest[1] < PROBE_S, slowest
    with capsys.disabled():
        print(f"\nseed {seed}: {asked} probes of {len(names)} hostile packages, slowest {slowest[1]:.3f} s")


@pytest.mark.parametrize("seed", SEEDS)
def test_commands_answer_and_name_what_is_broken(tmp_path: Path, monkeypatch, capsys, forgotten, seed: int) -> None:
    make_site(tmp_path, Random(seed), PACKAGES)
    monkeypatch.syspath_prepend(str(tmp_path))
    kernelhub.reload()
    assert kernelhub.attention(*qkv()).shape == (1, 4, 4, 16)
    assert kernelhub.explain("attention", head_dim_qk=64, head_dim_vo=64).selected is not None
    assert main(["backends", "--json"]) == 0
    backends = {item["name"]: item for item in json.loads(capsys.readouterr().out)["backends"]}
    assert backends["torch"]["error"] == ""
    main(["doctor", "--json"])
    facts = json.loads(capsys.readouterr().out)["facts"]
    told = [fact for fact in facts if fact["meaning"].startswith("metadata_broken")]
    broken = distributions.broken()
    assert len(told) == len(broken) > PACKAGES // 2
    assert {fact["status"] for fact in told} == {"note"}
    with capsys.disabled():
        print(f"\nseed {seed}: {len(broken)} of {PACKAGES} distributions named by doctor")
