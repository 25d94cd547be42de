"""What the Triton kernels of mixtures of experts do inside: sorting, tiles of every size, rounds, tuned tiles."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.shared import sorted_sizes
from kernelhub.backends.triton.moe import experts_adapter
from kernelhub.backends.triton.moe.activations import NO_FORM
from kernelhub.backends.triton.moe.activations import Activations as Formats
from kernelhub.backends.triton.moe.experts_adapter import Experts
from kernelhub.backends.triton.moe.tiles import choose, default_tiles, rows_of_a_tile
from kernelhub.backends.triton.moe.tuned import TUNED, Tiles, Tuned
from kernelhub.ops.moe.experts.activations import Activations
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.problem import ExpertsProblem
from kernelhub.ops.moe.experts.tolerance import compare
from kernelhub.probes.device import facts, simulated
from tests.conftest import DEVICE

pytestmark = pytest.mark.device

SIZES = {"num_experts": 3, "top_k": 2, "hidden_size": 64, "intermediate_size": 32}


def problem(**changes: Any) -> ExpertsProblem:
    return ExpertsProblem(device=facts(torch.device(DEVICE)), **changes)


class TestSorting:
    @pytest.mark.parametrize("counted_alone", [True, False], ids=["one launch", "counted before"])
    @pytest.mark.parametrize(
        ("tokens", "top_k", "experts", "spread"),
        [
            (1, 1, 1, 1.0),
            (7, 3, 5, 1.0),
            (700, 2, 6, 1.0),
            (40, 22, 60, 1.0),
            (300, 8, 256, 8.0),
            (140, 8, 256, 0.0),
            (450, 5, 300, 3.0),
        ],
    )
    def test_pairs_stand_expert_by_expert_in_their_order_and_tiles_are_padded(
        self, tokens, top_k, experts, spread, counted_alone, monkeypatch
    ) -> None:
        """A spread above 1 leaves most experts without pairs; of 0, none has any."""
        monkeypatch.setattr(experts_adapter, "_COUNTED_ALONE", 1 << 20 if counted_alone else 0)
        monkeypatch.setattr(experts_adapter, "_FEWEST_ROWS", 1 << 20)
        adapter = Experts(problem(num_experts=experts, top_k=top_k, expert_map=True))
        random = torch.Generator().manual_seed(0)
        uniform = torch.rand(tokens, top_k, generator=random)
        ids = (uniform**spread * (experts + 4) - 1).int() if spread else torch.full((tokens, top_k), -1).int()
        ids = ids.to(DEVICE)
        table = torch.arange(experts + 1, dtype=torch.int32).roll(1).sub(1).to(DEVICE)  # one is -1, the last is missing
        choice = choose(adapter.problem, tokens)
        block_m = choice.first.block_m
        strides = (*ids.stride(), table.stride(0))
        sizes = (ids.numel(), table.numel())
        formed = adapter._tokens.formed(torch.zeros(tokens, adapter.problem.hidden_size, device=DEVICE), None)
        pairs, tile_experts, num_rows = adapter._sort((ids, table), sizes, strides, adapter._round_of(tokens), formed)
        rows = int(num_rows)
        assert rows % block_m == 0
        assert rows <= len(pairs)
        assert rows // block_m <= len(tile_experts)
        flat = ids.flatten().tolist()
        local = [int(table[one]) if 0 <= one < len(table) else -1 for one in flat]
        want: list[int] = []
        want_tiles: list[int] = []
        for expert in range(experts):
            own = [pair for pair, of in enumerate(local) if of == expert]
            own += [len(flat)] * (-len(own) % block_m)
            want += own
            want_tiles += [expert] * (len(own) // block_m)
        assert pairs[:rows].tolist() == want
        assert tile_experts[: rows // block_m].tolist() == want_tiles

    @pytest.mark.parametrize("experts", [16, 128, 256, 500])
    def test_sizes_of_a_class_of_tiles_share_the_compiled_sort(self, experts: int) -> None:
        adapter = Experts(problem(num_experts=experts, top_k=4))
        most = 4 * experts
        for rows, tokens in ((16, (1, 2, 17, most)), (32, (most + 1, 2 * most)), (128, (16 * most + 1, 20 * most))):
            assert {rows_of_a_tile(4 * count, experts) for count in tokens} == {rows}
            rounds = [adapter._round_of(count) for count in tokens]
            assert len({(round_.sorter, round_.counted) for round_ in rounds}) == 1

    def test_the_bounds_hold_however_pairs_are_spread(self) -> None:
        adapter = Experts(problem(num_experts=8, top_k=2))
        for pairs in (1, 7, 8, 9, 100):
            for block_m in (16, 128):
                rows, tiles = adapter._bounds(pairs, block_m)
                for hit in range(1, min(8, pairs) + 1):
                    counts = [1] * (hit - 1) + [pairs - hit + 1]
                    assert sum(-(-count // block_m) for count in counts) <= tiles
                    even = [pairs // hit + (place < pairs % hit) for place in range(hit)]
                    assert sum(-(-count // block_m) for count in even) * block_m <= rows


class TestFewLaunches:
    """What few rows make along with another launch, beside the launches that do it for many."""

    @pytest.mark.parametrize(
        ("weights", "further"),
        [
            ("fp8_block", {}),
            ("fp8_block_ue8m0", {"residual": True}),
            ("fp8_channel", {}),
            ("fp8_tensor", {"a1_scale": 0.01, "a2_scale": 0.02}),
            ("mxfp4", {"activation": "swiglu_oai"}),
            ("nvfp4", {}),
            ("mxint4", {"apply_router_weight_on_input": True}),
        ],
    )
    def test_the_bits_are_those_of_separate_launches(
        self, weights: str, further: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes = SIZES | {"hidden_size": 160, "intermediate_size": 256}
        arguments = moe_inputs(tokens=9, weights=weights, device=DEVICE, **sizes)
        for name, value in further.items():
            arguments[name] = torch.tensor(value, device=DEVICE) if name.endswith("_scale") else value
        if "residual" in further:
            arguments["residual"] = torch.ones_like(arguments["x"])
        arguments["topk_ids"][2], arguments["topk_ids"][5, 0] = -1, -1
        arguments["x"][3] = 0.0
        arguments["x"] = torch.cat([arguments["x"]] * 2, 1)[:, :160]  # rows apart
        kernelhub.fused_moe.op._forget()
        got = kernelhub.fused_moe(**arguments, backend="triton.experts")
        monkeypatch.setattr(experts_adapter, "_PLANES_ROWS", 0)
        monkeypatch.setattr(Formats, "_form", lambda self, static: NO_FORM)
        kernelhub.fused_moe.op._forget()
        want = kernelhub.fused_moe(**arguments, backend="triton.experts")
        kernelhub.fused_moe.op._forget()
        assert torch.equal(got, want)


class TestTiles:
    @pytest.mark.parametrize("weights", ["plain", "fp8_channel"])
    @pytest.mark.parametrize("tokens", [20, 60, 130])
    def test_experts_with_many_rows_take_larger_tiles(self, tokens: int, weights: str) -> None:
        arguments = moe_inputs(tokens=tokens, weights=weights, device=DEVICE, **SIZES | {"num_experts": 1, "top_k": 1})
        plan = kernelhub.fused_moe.prepare(**arguments, backend="triton.experts")
        assert plan.tiles(tokens).startswith(f"{rows_of_a_tile(tokens, 1)} x ")
        out = plan.run(arguments["x"], arguments["topk_weights"], arguments["topk_ids"])
        agreement = compare(out, arguments)
        assert agreement.ok, str(agreement)

    def test_rows_of_a_tile_follow_the_rows_of_an_expert(self) -> None:
        assert [rows_of_a_tile(pairs, 4) for pairs in (1, 64, 65, 128, 129, 256, 257, 10**6)] == [
            *(16, 16, 32, 32, 64, 64, 128, 128)
        ]

    def test_measured_tiles_are_found_and_said_to_be(self) -> None:
        layer = ExpertsProblem(device=simulated("H200"))
        few, many = Tiles(16, 64, 128, 4, 4), Tiles(128, 64, 64, 8, 3)
        table = [
            Tuned("hopper", "plain", "bfloat16", 128, 8, 2048, 768, 1, few, few, 1.0, 2.0, "a test"),
            Tuned("hopper", "plain", "bfloat16", 128, 8, 2048, 768, 1024, many, many, 1.0, 2.0, "a test"),
        ]
        assert (choose(layer, 1, table).source, choose(layer, 1, table).first) == ("exact", few)
        assert (choose(layer, 1024, table).source, choose(layer, 1024, table).second) == ("exact", many)
        assert (choose(layer, 8, table).source, choose(layer, 8, table).first) == ("nearest", few)
        assert (choose(layer, 4096, table).source, choose(layer, 4096, table).first) == ("nearest", many)
        assert "measured for another number of tokens" in str(choose(layer, 8, table))
        for other in (
            {"device": simulated("B200")},
            {"hidden_size": 1024},
            {"weights": "fp8_block", "activation_dtype": "float8_e4m3fn"},
        ):
            assert choose(dataclasses.replace(layer, **other), 1, table).source == "default"
        with pytest.raises(ValueError, match="the same tiles of rows"):
            Tuned("hopper", "plain", "bfloat16", 128, 8, 2048, 768, 1, few, many, 1.0, 2.0, "a test")

    def test_every_measured_entry_says_on_what(self) -> None:
        for entry in TUNED:
            assert entry.evidence
            assert entry.num_tokens > 0
            assert 0 < entry.ms <= 1.02 * entry.default_ms
        assert {entry.family for entry in TUNED} == {"hopper"}, "measured on nothing else"

    def test_a_layer_that_was_measured_takes_those_tiles(self) -> None:
        layer = {"num_experts": 256, "hidden_size": 7168, "intermediate_size": 256, "weights": "fp8_block"}
        layer["activation_dtype"] = "float8_e4m3fn"
        for device, dtype, source in (
            ("H200", "bfloat16", "exact"),
            ("H100", "bfloat16", "exact"),
            ("H200", "float32", "default"),
            ("B200", "bfloat16", "default"),
        ):
            problem = ExpertsProblem(device=simulated(device), dtype=dtype, **layer)
            assert choose(problem, 1024).source == source
            assert ("measured" in Experts(problem).tiles(1024)) == (source == "exact")

    def test_no_tile_of_columns_is_in_two_blocks_of_scales(self) -> None:
        for device in ("A100", "L40S", "H200", "B200", "RTX5090"):
            for dtype in ("bfloat16", "float32"):
                for quantized in ("float8_e4m3fn", dtype):
                    layer = ExpertsProblem(
                        device=simulated(device), dtype=dtype, weights="fp8_block", activation_dtype=quantized
                    )
                    for gated in (False, True):
                        for block_m in (16, 32, 64, 128):
                            tiles = default_tiles(layer, block_m, gated)
                            assert tiles.block_k == 128
                            assert 128 % tiles.block_n == 0
                            assert tiles.block_m <= block_m


class TestRounds:
    @pytest.mark.parametrize("kernel", ["triton.experts", "torch.experts"])
    def test_more_tokens_than_a_round_holds_give_the_same(self, kernel, monkeypatch) -> None:
        arguments = moe_inputs(tokens=11, device=DEVICE, **SIZES)
        arguments["residual"] = torch.randn_like(arguments["x"])
        whole = kernelhub.fused_moe(**arguments, backend=kernel)
        monkeypatch.setattr(sorted_sizes, "MOST_ADDED", 4 * 2 * 64 * 2)  # 4 tokens
        monkeypatch.setattr("kernelhub.backends.torch.moe.experts._MOST_ADDED", 4 * 2 * 64)
        plan = kernelhub.fused_moe.prepare(**arguments, backend=kernel)
        assert plan.workspace_bytes(num_tokens=11) == plan.workspace_bytes(num_tokens=4)
        out = torch.full_like(whole, torch.nan)
        plan.run(arguments["x"], arguments["topk_weights"], arguments["topk_ids"], arguments["residual"], out)
        agreement = compare(out, arguments)
        assert agreement.ok, str(agreement)
        torch.testing.assert_close(out, whole, rtol=2**-6, atol=2**-7)


class TestQuantizing:
    """Codes of activations against those of the reference, of every value of bfloat16 that a token may hold."""

    @pytest.mark.parametrize("weights", ["fp8_channel", "fp8_block"])
    @pytest.mark.parametrize("static", [False, True])
    def test_codes_and_scales_are_those_of_the_reference(self, weights: str, static: bool) -> None:
        if static and weights == "fp8_block":
            return
        layer = problem(
            weights=weights,
            activation_dtype="float8_e4m3fn",
            hidden_size=200,
            intermediate_size=256,
            static_scales=static,
        )
        random = torch.Generator().manual_seed(0)
        rows = (torch.randn(33, 200, generator=random) * 10 ** torch.randn(33, 1, generator=random)).bfloat16()
        rows[3], rows[4, 1:] = 0.0, 0.0
        rows = rows.to(DEVICE)
        scale = torch.tensor(0.01, device=DEVICE) if static else None
        codes, scales = Experts(layer)._tokens(rows, scale)
        assert scales is not None
        grouped = weights == "fp8_block"
        width = 128 if grouped else 200
        spread = scales.reshape(33 if not static else 1, -1).repeat_interleave(width, 1)[:, :200]
        values = codes.view(torch.float8_e4m3fn).float() * spread
        want = Activations("float8_e4m3fn", grouped).rounded(rows, scale, torch.float32)
        # A division that is off by 2^-22 may fall on the other side of the middle between two codes.
        moved = (values - want).abs() > 2.0**-20 * want.abs()
        assert float(moved.float().mean()) < 1e-3
        torch.testing.assert_close(values, want, rtol=2**-3, atol=0)
