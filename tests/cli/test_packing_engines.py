"""`tune`, `agree` and `kernelhub lock` of an engine that packs rank kernels that need that, and nobody else's do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.evidence import store, trust
from kernelhub.ops.models.calls import need_of
from kernelhub.ops.moe.experts.inputs import moe_inputs
from tests.backends.marlin_fake import on_the_cpu
from tests.dispatch.backends import register
from tests.ops.test_packed_experts import SIZES, layer, packed, record
from tests.warming.test_packing import CLAIMED, PRODUCTS, RIGHT, WRONG

MODEL = ("--model", "qwen3-30b-a3b", "--tp", "8", "--device", "cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path / "cache"))
    kernelhub.reload()
    yield
    trust.forget_unwritten()
    store.forget_unwritten()


@pytest.fixture
def arguments() -> dict[str, Any]:
    return moe_inputs(**SIZES)


def need(arguments: dict[str, Any]) -> Any:
    return need_of("fused_moe", kernelhub.fused_moe.explain(**arguments).problem)


class TestTune:
    def tuned(self, arguments: dict[str, Any], *backend: str, **more: Any) -> Any:
        asked: dict[str, Any] = {"token_counts": [2], "device": "cpu", "samples": 3, "configurations": False}
        return kernelhub.tune([need(arguments)], backend=backend, **asked, **more)

    def test_kernels_that_need_it_are_verified_and_timed_with_weights_that_they_packed(self, arguments) -> None:
        register("mirror", RIGHT)
        register("broken", WRONG)
        found = self.tuned(arguments, "mirror", "broken", "torch.experts", packing=True)
        (entry,) = found.entries
        assert set(entry.ranking) == {"mirror.right", "torch.experts"}
        assert "wrong" in found.wrong["fused_moe", "broken.wrong"]
        best = entry.ranking[0]
        assert kernelhub.fused_moe.explain(**arguments, packing=True).selected == best
        assert kernelhub.fused_moe.explain(**arguments).selected == "torch.experts", "who does not pack"

    def test_without_packing_they_are_not_measured(self, arguments) -> None:
        register("mirror", record())
        assert set(self.tuned(arguments, "mirror", "torch.experts").entries[0].ranking) == {"torch.experts"}

    def test_a_layout_that_rounds_scales_is_timed_too(self) -> None:
        with on_the_cpu(standings=CLAIMED):
            problem = kernelhub.explain("fp8_gemm", device="cpu", **PRODUCTS["fp8_gemm"]).problem
            asked: dict[str, Any] = {"token_counts": [2], "device": "cpu", "samples": 3, "configurations": False}
            found = kernelhub.tune([need_of("fp8_gemm", problem)], packing=True, **asked)
        (entry,) = found.entries
        assert [name for name in entry.ranking if name.startswith("fake.")]


class TestAgree:
    def test_ranks_agree_on_a_kernel_that_needs_it_and_its_plans_run(self, arguments) -> None:
        register("mirror", record())
        (choice,) = kernelhub.agree(what=[need(arguments)], device="cpu", packing=True).choices
        assert choice.kernel == "mirror.k"
        plan = kernelhub.fused_moe.prepare(**arguments, packing=True)
        assert plan.kernel == "mirror.k"
        plan.pack(**layer(arguments))
        want = kernelhub.fused_moe.reference(**arguments)
        torch.testing.assert_close(kernelhub.fused_moe(**packed(arguments)).float(), want.float(), atol=2e-2, rtol=2e-2)

    def test_without_packing_they_agree_on_one_that_reads_the_checkpoint(self, arguments) -> None:
        register("mirror", record())
        (choice,) = kernelhub.agree(what=[need(arguments)], device="cpu").choices
        assert choice.kernel != "mirror.k"

    def test_a_rank_that_does_not_pack_is_named(self, arguments) -> None:
        from kernelhub.dispatch.explain import device_facts
        from kernelhub.runtime.ranks.settle import Failure, settle
        from kernelhub.runtime.ranks.statement import state, statement_of

        where = device_facts("cpu")
        said = [
            statement_of(state([need(arguments)], where, packing), rank, f"host {rank}", "")
            for rank, packing in enumerate((True, False))
        ]
        failure = settle(said, {})
        assert isinstance(failure, Failure)
        assert (failure.code, failure.ranks) == ("policy_differs", (0, 1))
        assert "packing is unset on" in failure.message


class TestLock:
    def test_the_file_holds_kernels_that_need_it_and_says_that_it_was_asked_so(
        self, ask, tmp_path, monkeypatch
    ) -> None:
        register("mirror", record())
        path = tmp_path / "held.json"
        assert ask("lock", *MODEL, "--packing", "--out", str(path)).code == 0
        items = [item for item in json.loads(path.read_text())["decisions"] if item["op"] == "fused_moe"]
        assert [(item["problem"]["rows"], item["kernel"]) for item in items] == [
            ("few", "mirror.k"),
            ("many", "mirror.k"),
        ]
        item = items[0]
        assert ask("lock", "--check", str(path), "--device", "cpu").code == 0
        assert ask("lock", "--check", str(path), "--device", "cpu", "--packing").code == 2

        monkeypatch.setenv("KERNELHUB_LOCK", str(path))
        HUB.restore()
        register("mirror", record())
        selection = kernelhub.explain("fused_moe", device="cpu", packing=True, **item["problem"])
        assert (selection.selected, selection.source) == ("mirror.k", "lock")
        layout = {**item["problem"], "weight_layout": record().packs_to}
        assert kernelhub.explain("fused_moe", device="cpu", **layout).source == "lock"
        assert HUB.settings.lock.command.startswith("kernelhub lock --model qwen3-30b-a3b --tp 8 --packing --out")

    def test_without_packing_the_file_holds_one_that_reads_the_checkpoint(self, ask, tmp_path) -> None:
        register("mirror", record())
        path = tmp_path / "held.json"
        assert ask("lock", *MODEL, "--out", str(path)).code == 0
        assert "mirror.k" not in {item["kernel"] for item in json.loads(path.read_text())["decisions"]}
