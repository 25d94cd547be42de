"""Plugins with one thing wrong: each is named and left out, or its kernel is; calls and commands go on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import kernelhub
from kernelhub.cli.main import main
from kernelhub.dispatch.hub import HUB
from tests.dispatch.backends import qkv
from tests.fuzz.hostile_plugins import plugin

PLUGINS = 60
SEEDS = range(3)
ADAPTER = """
from kernelhub.ops.attention.adapter import AttentionAdapter

class Fast(AttentionAdapter):
    def launch(self, q, k, v, step, values, out, lse):
        out.fill_(7.0)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A site-packages folder of its own; what is imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("hostile_"):
            del sys.modules[name]


def install(site: Path, seed: int) -> dict[str, str]:
    """Many plugins, and what is wrong with each."""
    random, wrong = Random(seed), {}
    for number in range(PLUGINS):
        name = f"hostile_{seed}_{number}"
        text, wrong[name] = plugin(name, random)
        (site / f"{name}.py").write_text(text)
        (site / f"{name}_adapter.py").write_text(ADAPTER)
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kernelhub.backends]\n{name} = {name}\n")
    return wrong


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The JSON document that a command prints."""

    def run(*words: str) -> Any:
        main(words)
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("seed", SEEDS)
def test_the_rest_goes_on_and_each_is_named(site: Path, caplog, capsys, answer, seed: int) -> None:
    wrong = install(site, seed)
    kernelhub.reload()
    broken = {name for name, item in HUB.registry.backends.items() if item.error}
    assert broken <= set(wrong)
    assert all(item.code for item in HUB.registry.backends.values() if item.error)
    assert all(name in caplog.text for name in broken)
    assert kernelhub.attention(*qkv()).shape == (1, 4, 4, 16)
    assert float(kernelhub.attention(*qkv(), backend="torch").mean()) != 7.0
    decisions = kernelhub.explain(kernelhub.attention, *qkv()).decisions
    assert len(decisions) == len(kernelhub.attention.kernels())
    assert all(isinstance(item.reason, str) for item in decisions)
    rejected = [item for item in decisions if item.code == "constraint_error"]
    kinds = {item["name"]: item["code"] for item in answer("backends", "--json")["backends"]}
    assert {name for name, code in kinds.items() if code} == broken
    told = [fact["what"] for fact in answer("doctor", "--json")["facts"] if fact["what"].startswith("backend hostile_")]
    assert len(told) == len([item for item in HUB.registry.backends.values() if not item.builtin])
    answer("backends", "--matrix", "--json")
    with capsys.disabled():
        print(f"\nseed {seed}: of {PLUGINS} plugins {len(broken)} left out, {len(rejected)} kernels rejected")
