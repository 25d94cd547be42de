"""Sizes of kernels, such as tiles: tried, checked, kept as data, and looked up as exact, nearest or default."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.triton.gemm.fp8 import tiles as gemm_tiles
from kernelhub.backends.triton.moe import candidates as expert_tiles
from kernelhub.dispatch.configuration import Configurable
from kernelhub.dispatch.hub import HUB
from kernelhub.evidence.tuning import tables
from kernelhub.evidence.tuning.measure import Limits, measure
from kernelhub.evidence.tuning.operands import Room
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.problem import SCALINGS
from kernelhub.ops.models.calls import calls_of, need_of
from kernelhub.ops.models.shapes import MoeModel
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.probes.device import simulated
from tests.conftest import DEVICE
from tests.evidence import sized
from tests.evidence.test_tune import FACETS, packed_call, tuned
from tests.evidence.tuned_entries import entry, keep

DEVICES = ("A100", "L40S", "H200", "B200", "RTX5090")


@pytest.fixture
def need() -> Any:
    return need_of("attention", kernelhub.explain("attention", device="cpu", **FACETS).problem)


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    sized.Sized.ran.clear()


def kernels() -> list[Any]:
    """Every record of ours that says it can take other sizes."""
    _ = HUB.settings
    return [kernel for item in HUB.registry.backends.values() for kernel in item.kernels if kernel.configurable]


class TestTrying:
    def test_the_fast_size_is_found_and_run_and_the_wrong_one_is_not(self, need) -> None:
        sized.attention()
        found = tuned(need, configurations=True, backend="sized")
        measured = found.entries[0].sizes[0].times["sized.k"]
        assert measured.configuration == {"wait_s": 0.0}
        assert measured.own_us > 3_000 > measured.us
        row = found.regret[0]
        assert row.chosen_regret.us == 0
        assert row.order_regret.us > 2_000, "the kernel with its own sizes is what runs without measurements"
        sized.Sized.ran.clear()
        packed_call()
        assert [(item.source, item.configuration) for item in sized.Sized.ran] == [("exact", {"wait_s": 0.0})]
        packed_call(10)
        assert sized.Sized.ran[-1].source == "nearest"
        packed_call(400)
        assert sized.Sized.ran[-1].source == "default"

    def test_they_are_read_after_a_reload_and_gone_when_switched_off(self, need, monkeypatch) -> None:
        sized.attention()
        tuned(need, configurations=True, backend="sized")
        kernelhub.reload()
        sized.Sized.ran.clear()
        packed_call()
        assert sized.Sized.ran[-1].source == "exact"
        monkeypatch.setenv("KERNELHUB_EVIDENCE", "0")
        kernelhub.reload()
        packed_call()
        assert sized.Sized.ran[-1].source == "default"

    def test_a_plan_of_other_sizes_has_another_fingerprint(self, need) -> None:
        sized.attention()
        q = torch.randn(1, 32, 2, 16)
        before = kernelhub.attention.prepare(q, q, q, causal=True, backend="sized").fingerprint
        facets = dict(need_of("attention", kernelhub.attention.explain(q, q, q, causal=True).problem).facets)
        us: Any = {"sized.k": 5.0, "torch.packed": 9.0}
        keep(entry("attention", facets, us, 32, **{"sized.k": {"configuration": {"wait_s": 0.001}, "own_us": 7.0}}))
        after = kernelhub.attention.prepare(q, q, q, causal=True, backend="sized").fingerprint
        assert before != after

    def test_measuring_again_begins_with_the_kernels_own(self, need) -> None:
        sized.attention()
        first = tuned(need, configurations=True, backend="sized")
        again = tuned(need, configurations=True, backend="sized")
        for found in (first, again):
            assert found.entries[0].sizes[0].times["sized.k"].own_us > 3_000

    def test_sizes_that_a_version_does_not_understand_are_reported_and_not_taken(self, need, caplog) -> None:
        sized.attention()
        facets = dict(need.facets)
        us: Any = {"sized.k": 5.0, "torch.packed": 9.0}
        keep(entry("attention", facets, us, 5, **{"sized.k": {"configuration": {"tile": 64}, "own_us": 7.0}}))
        packed_call()
        assert sized.Sized.ran[-1].source == "default"
        assert "sized.k rejected its tuned sizes and uses its defaults" in caplog.text


class TestTriton:
    def test_every_record_that_says_so_gives_an_adapter_that_can(self) -> None:
        found = kernels()
        assert {kernel.name for kernel in found} == {"triton.experts", "triton.fp8_gemm"}
        for kernel in found:
            module, _, name = kernel.target.partition(":")
            adapter = getattr(__import__(module, fromlist=[name]), name)
            assert issubclass(adapter, Configurable)

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("scaling", SCALINGS)
    @pytest.mark.parametrize("rows", [1, 40, 512])
    def test_tiles_of_products_are_plain_values_and_come_back(self, device, scaling, rows) -> None:
        facts = simulated(device)
        tried = list(gemm_tiles.candidates(facts, scaling, rows, 4096, 4096))
        assert tried
        assert len(set(tried)) == len(tried)
        assert gemm_tiles.tiles(facts, scaling, rows, 4096, 4096) not in tried
        for tile in tried:
            plain = json.loads(json.dumps(gemm_tiles.written(tile)))
            assert gemm_tiles.read(plain, scaling) == tile

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("tokens", [1, 64, 4096])
    def test_tiles_of_experts_are_plain_values_and_come_back(self, device, tokens) -> None:
        facets = {"num_experts": 64, "top_k": 8, "hidden_size": 2048, "intermediate_size": 768}
        problem = kernelhub.explain("fused_moe", device=device, **facets).problem
        first = expert_tiles.of_first(problem, tokens)
        assert first
        for pair in json.loads(json.dumps([*first, *expert_tiles.of_second(problem, expert_tiles.read(first[0])[0])])):
            assert expert_tiles.written(*expert_tiles.read(pair)) == pair

    @pytest.mark.parametrize(
        "wrong", [{}, {"first": [16, 64], "second": [16]}, {"first": [16, 48, 64, 4, 3, 8], "second": [16] * 6}]
    )
    def test_what_are_no_tiles_is_refused(self, wrong) -> None:
        with pytest.raises((KeyError, TypeError, ValueError)):
            expert_tiles.read(wrong)

    @pytest.mark.parametrize("wrong", [{"block_m": 16}, {**dict.fromkeys(("block_m", "block_n", "block_k"), 48)}])
    def test_what_are_no_tiles_of_a_product_is_refused(self, wrong) -> None:
        with pytest.raises((KeyError, TypeError, ValueError)):
            gemm_tiles.read({"num_warps": 4, "num_stages": 3, **wrong}, "block")

    @pytest.mark.device
    @pytest.mark.parametrize("scaling", ["block", "row"])
    def test_a_product_takes_measured_tiles_and_is_right_with_each(self, scaling) -> None:
        call = fp8_gemm_inputs(tokens=20, n=128, k=256, scaling=scaling, device=DEVICE)
        plan = kernelhub.fp8_gemm.prepare(**call, backend="triton")
        want = kernelhub.fp8_gemm.reference(**call).float()
        given = {name: call[name] for name in ("a", "b", "a_scale", "b_scale")}
        offered = plan.adapter.configurations(20, 0, None)
        assert not plan.adapter.configurations(20, 1, offered[0])
        for configuration in offered[:: max(1, len(offered) // 4)]:
            plan.adapter.configure({20: configuration})
            assert plan.adapter._tile(20) == gemm_tiles.read(configuration, scaling)
            assert plan.adapter.workspace_bytes(num_tokens=64) >= 0
            torch.testing.assert_close(plan.run(**given).float(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
        plan.adapter.configure({})
        assert plan.adapter._tile(20) == gemm_tiles.tiles(plan.selection.problem.device, scaling, 20, 128, 256)

    @pytest.mark.device
    def test_experts_say_whether_their_tiles_were_measured(self) -> None:
        model = MoeModel("", 4, 2, 64, 32)
        call = moe_inputs(model, tokens=6, dtype=torch.float16, device=DEVICE)
        plan = kernelhub.fused_moe.prepare(**call, backend="triton")
        assert "default" in plan.tiles(6)
        usual = plan.run(call["x"], call["topk_weights"], call["topk_ids"])
        other = {"first": [32, 32, 32, 4, 2, 8], "second": [32, 32, 32, 4, 2, 8]}
        plan.adapter.configure({6: other})
        assert plan.tiles(6).startswith("32 x 32 x 32, 4 warps, 2 stages and 32 x 32 x 32")
        assert "exact: measured" in plan.tiles(6)
        assert "nearest: measured for another number of tokens" in plan.tiles(12)
        assert "default" in plan.tiles(600)
        again = plan.run(call["x"], call["topk_weights"], call["topk_ids"])
        torch.testing.assert_close(again.float(), usual.float(), rtol=2e-2, atol=2e-2)

    @pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter is on only where there is no GPU")
    def test_a_real_search_over_tiles_ends_with_tiles_that_are_right(self) -> None:
        """On a CPU under Triton's interpreter: what is fast there means nothing, what is right does."""
        problem = kernelhub.explain("fp8_gemm", device="cpu", n=64, k=128).problem
        kernel = next(item for item in kernels() if item.name == "triton.fp8_gemm")
        (call,) = calls_of(need_of("fp8_gemm", problem), [3], "cpu")
        limits = Limits(Room(torch.device("cpu")), samples=5, sampling_s=0.1)
        with torch.no_grad():
            size = measure(kernelhub.fp8_gemm, [kernel], call.arguments, call.tokens, call.label, limits)
        measured = size.times["triton.fp8_gemm"]
        if measured.configuration is not None:
            gemm_tiles.read(measured.configuration, "block")
            assert measured.us < measured.own_us
        plan = kernelhub.fp8_gemm.prepare(**call.arguments, backend="triton")
        assert plan.adapter._measured == {}, "the search leaves no trace in the adapter"


def test_an_entry_with_sizes_survives_the_file(tmp_path, need) -> None:
    sized.attention()
    us: Any = {"sized.k": 5.0, "torch.packed": 9.0}
    one = entry("attention", dict(need.facets), us, 5, **{"sized.k": {"configuration": {"wait_s": 0}, "own_us": 7.0}})
    cpu = kernelhub.explain("attention", device="cpu").problem.device
    tables.export(tmp_path / "x.json", cpu, [one])
    (plain,) = tables.read_table(tmp_path / "x.json", cpu)
    assert type(one).from_dict(plain).tuned() == one.tuned()
    assert one.tuned().configurations == {"sized.k": {5: {"wait_s": 0}}}
