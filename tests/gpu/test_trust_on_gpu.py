"""Trust is earned anew on a GPU: with what the project says of it forgotten, warm-up comes to the same kernels."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.standing import OPT_IN, UNTESTED, Standing
from kernelhub.ops.models.problems import problems_of
from kernelhub.probes.device import facts
from kernelhub.runtime.progress import bar
from tests.evidence import fake_vendor

pytestmark = pytest.mark.gpu

COUNTS = (1, 16, 64, 512, 2048)
MODELS = [("llama-3.1-8b", {"tp": 1}), ("deepseek-v3.2", {"tp": 8, "ep": 8})]
BUDGET_S = 240.0


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path / "caches"))
    monkeypatch.setenv("KERNELHUB_VERIFY_TIMEOUT_S", "120")
    kernelhub.reload()


@pytest.fixture
def forget(monkeypatch):
    """Forget what the project says of kernels of libraries on this GPU."""

    def forgotten() -> None:
        own = Kernel.standing_on

        def standing_on(kernel: Kernel, family: str) -> Standing:
            known = own(kernel, family)
            portable = kernel in HUB.registry.candidates(kernel.op).portable
            return known if portable or known.word == OPT_IN else replace(known, word=UNTESTED, evidence="")

        monkeypatch.setattr(Kernel, "standing_on", standing_on)
        kernelhub.reload()

    yield forgotten
    monkeypatch.undo()
    kernelhub.reload()


def chosen(model: str, setting: dict[str, Any]) -> dict[Any, str | None]:
    """The kernel of each problem class of a model."""
    return {
        (need.op, need.facets): HUB.function(need.op).op.select(need.problem("cuda"), None).selected
        for need in problems_of(model, **setting)
    }


@pytest.mark.parametrize(("model", "setting"), MODELS, ids=str)
def test_the_same_kernels_win_once_trust_is_earned_anew(model, setting, forget) -> None:
    shipped = chosen(model, setting)
    forget()
    untrusted = chosen(model, setting)
    sizes = {"token_counts": COUNTS, "max_context_len": 4096}
    with (results() / f"trust_{model}.log").open("w") as stream, bar(stream) as progress:
        done = kernelhub.warmup(model, verify_budget_s=BUDGET_S, progress=progress, **sizes, **setting)
    earned = chosen(model, setting)
    note(model, done, shipped, untrusted, earned)
    late = {note.split(" would be first")[0] for note in done.notes if "would be first" in note}
    wrong = {key: (shipped[key], earned[key]) for key in shipped if earned[key] != shipped[key]}
    assert {key: pair for key, pair in wrong.items() if f"{key[0]} {pair[0]}" not in late} == {}


def test_a_wrong_library_is_passed_over_and_a_right_one_is_not(tmp_path, monkeypatch) -> None:
    site = tmp_path / "site"
    fake_vendor.install(site, ("a_dies", "d_wrong", "g_right"), facts(torch.device("cuda", 0)).family)
    monkeypatch.syspath_prepend(str(site))
    try:
        kernelhub.reload()
        needs = [need for need in problems_of("llama-3.1-8b", tp=8, phases=["prefill"]) if need.op == "attention"]
        done = kernelhub.warmup(needs, token_counts=(17, 64))
        tried = [(item.kernel, item.ok) for item in done.earned]
        assert tried[:3] == [("vendor.a_dies", False), ("vendor.d_wrong", False), ("vendor.g_right", True)]
        assert {item.kernel for item in done.items} == {"vendor.g_right"}
    finally:
        fake_vendor.uninstall(site)


def note(model: str, done: Any, shipped: Any, untrusted: Any, earned: Any) -> None:
    """Keep what it took beside the other results of this machine."""
    told = {
        "device": done.device,
        "torch": torch.__version__,
        "seconds": round(sum(item.seconds for item in done.earned), 1),
        "stages": {stage: round(seconds, 1) for stage, seconds in done.stages},
        "earned": [item.to_dict() for item in done.earned],
        "classes": len(shipped),
        "changed_without_standing": sum(untrusted[key] != shipped[key] for key in shipped),
        "other_than_shipped": sum(earned[key] != shipped[key] for key in shipped),
        "notes": list(done.notes),
    }
    (results() / f"trust_{model}.json").write_text(json.dumps(told, indent=1))


def results() -> Path:
    """Where results of this machine go."""
    folder = Path(os.environ.get("OUT", "build"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
