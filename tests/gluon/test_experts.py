"""The Gluon experts in the emulator: their contract, their tiles under many interleavings, and planted faults."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelhub.backends.gluon.moe import adapter, layer, product
from kernelhub.backends.gluon.moe.adapter import Experts
from kernelhub.ops.formats import to_e4m3
from kernelhub.ops.moe.experts.adapter import Values
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.problem import BLOCK_FORMATS, FP8, FP8_BLOCK, ExpertsProblem
from kernelhub.ops.moe.experts.tolerance import compare
from kernelhub.ops.moe.experts.weights import Matrix
from kernelhub.probes.device import simulated
from tests.contract.experts import ExpertsContract
from tests.gluon.emulate import EmulationError
from tests.gluon.emulated import Emulated, emulated
from tests.gluon.planted import planted

ONE_SM = dataclasses.replace(simulated("H200"), num_sms=1)


class TestExperts(Emulated, ExpertsContract):
    kernel = "emulated.experts"
    labels = tuple(
        f"{name}, fp8_block, 5 experts"
        for name in (
            *("0 tokens", "17 tokens", "float16", "w2_bias"),
            *("activation gelu", "activation gelu_tanh", "activation swiglu_clamped", "activation swiglu_step"),
        )
    )
    weights = "fp8_block"
    wide = False
    formats = BLOCK_FORMATS


def problem(**facets: Any) -> ExpertsProblem:
    return ExpertsProblem(device=ONE_SM, weights=FP8_BLOCK, activation_dtype=FP8, **facets)


def test_up_to_48_rows_of_an_expert_on_average_have_small_tiles() -> None:
    experts = Experts(problem(num_experts=128, top_k=8))
    tokens = 48 * 128 // 8
    assert [experts._rows(count) for count in (1, tokens, tokens + 1)] == [64, 64, 128]


class TestPlaces:
    @pytest.mark.parametrize("most", [0, 1 << 20], ids=["counted before", "one launch"])
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
    def test_pairs_stand_expert_by_expert_in_their_order(
        self, tokens: int, top_k: int, experts: int, spread: float, most: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A spread above 1 leaves most experts without pairs; of 0, none has any."""
        monkeypatch.setattr(layer, "_COUNTED_ALONE", most)
        random = torch.Generator().manual_seed(0)
        uniform = torch.rand(tokens, top_k, generator=random)
        ids = (uniform**spread * (experts + 4) - 1).int() if spread else torch.full((tokens, top_k), -1).int()
        table = torch.arange(experts + 1, dtype=torch.int32).roll(1).sub(1)  # one is -1, the last is missing
        with emulated():
            placed = Experts(problem(num_experts=experts, top_k=top_k, expert_map=True))._sort(ids, table, 64)
        flat = ids.flatten()
        known = (flat >= 0) & (flat < len(table))
        local = torch.where(known, table[flat.clamp(0, len(table) - 1)], -1)
        local[(local < 0) | (local >= experts)] = experts
        order = local.argsort(stable=True)
        counts = local.bincount(minlength=experts + 1)[:experts]
        want = torch.full_like(flat, -1)
        want[order[: counts.sum()]] = torch.arange(int(counts.sum()), dtype=torch.int32)
        assert torch.equal(placed.places, want)
        assert torch.equal(placed.pairs[: counts.sum()].long(), order[: counts.sum()])
        ends = counts.cumsum(0)
        tiles = [
            (expert, row, int(ends[expert]))
            for expert in range(experts)
            for row in range(int(ends[expert] - counts[expert]), int(ends[expert]), 64)
        ]
        assert int(placed.num_tiles) == len(tiles) <= placed.experts.numel()
        assert [tuple(int(part[at]) for part in placed[2:5]) for at in range(len(tiles))] == tiles


def right(seed: int, kernel: Any, monkeypatch: pytest.MonkeyPatch, rows: int = 128) -> bool:
    """Whether both products of one program give the reference: full tiles, one of few rows, more steps than stages."""
    monkeypatch.setattr(adapter, "experts_kernel", kernel)
    sizes = {"num_experts": 3, "top_k": 1, "hidden_size": 272, "intermediate_size": 256}
    arguments = moe_inputs(tokens=135, weights=FP8_BLOCK, **sizes)
    x, ids, first, second = (arguments[name] for name in ("x", "topk_ids", "w13", "w2"))
    arguments["topk_weights"].fill_(1.0)
    ids.fill_(0)
    ids[[3, 133]], ids[70] = 2, 1
    ours = Experts(problem(**sizes))
    made = torch.empty(135, 256, dtype=torch.float8_e4m3fn), torch.empty(2, 135), torch.empty(135, 272).bfloat16()
    with emulated(seed):
        placed = ours._sort(ids, None, rows)
        groups = torch.nn.functional.pad(x.float(), (0, 112)).unflatten(1, (3, 128))
        scales = groups.abs().amax(2) / 448.0
        codes = to_e4m3(groups / scales.unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn)
        counters = torch.zeros(2, dtype=torch.int32)
        whole = (arguments["topk_weights"], placed, counters, Values())
        ours._multiply(True, rows, codes, scales, Matrix(first, arguments["w13_scale"], None, None), *whole, *made[:2])
        joined = (made[0], made[1].t())
        ours._multiply(False, rows, *joined, Matrix(second, arguments["w2_scale"], None, None), *whole, made[2], None)
    some = {name: arguments[name][60:] for name in ("x", "topk_ids", "topk_weights")}
    return compare(made[2][placed.places[60:].long()], arguments | some).ok


@pytest.mark.parametrize("rows", [128, 64])
def test_every_interleaving_gives_the_reference(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(2):
        assert right(seed, product.experts_kernel, monkeypatch, rows)


FAULTS = {
    "the loader does not wait for an empty stage": (
        "mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)",
        "pass",
    ),
    "no wait for the operands": ("mbarrier.wait(full.index(s), (step // STAGES) & 1)\n        if FIRST", "if FIRST"),
    "no fence after rows were copied": ("fence_async_shared()  # threads", "pass  # threads"),
    "copies of rows are not awaited": ("count=130 if FIRST else 2", "count=2"),
    "bytes of one block of weights are awaited": (
        "mbarrier.expect(full.index(s), 2 * b_desc.block_type",
        "mbarrier.expect(full.index(s), b_desc.block_type",
    ),
    "rows of a second half are not awaited": ("2 * a_desc.block_type", "a_desc.block_type"),
    "a tile of few rows awaits as many as one of many": ("pred=left <= 64", "pred=left < 0"),
    "scales of the second block are those of the first": ("number(of_b1, B_E8M0)", "number(of_b0, B_E8M0)"),
    "the stage is released before the second product": (
        "        sums0 += p0",
        "        mbarrier.arrive(empty.index(s), count=1)\n        sums0 += p0",
    ),
    "no wait for the first product": ("p0 = warpgroup_mma_wait(0, deps=(p0,))", "pass"),
    "the other half's maximum is not awaited": (
        "mbarrier.wait(known.index(place + 1 - WHICH), shared // 2 & 1)",
        "pass",
    ),
    "maxima of two tiles share a place": ("place = shared % 2 * 2", "place = shared * 0"),
    "a tile of few rows has one half of its columns twice": ("WHICH, 0, WHICH * 64, 64", "WHICH, 0, 0, 64"),
    "scales of weights do not change": ("gl.load(b1_at + ahead", "gl.load(b1_at + 0"),
    "scales of rows do not change": ("gl.load(a_at + ahead", "gl.load(a_at + 0"),
    "rows of the next expert are stored": ("(rows < left)[:, None] & (columns", "(rows < 64)[:, None] & (columns"),
    "gate and up trade places": ("joined(sums0, sums1,", "joined(sums1, sums0,"),
    "a tile is told too late": (
        "expert, row, left, place = tile_told(told.index(step % STAGES))",
        "expert, row, left, place = tile_told(told.index((step + 1) % STAGES))",
    ),
    "no tile is the last": ("told.index(s).store(field * 0 - 1)", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = planted(product, *FAULTS[fault], tmp_path).experts_kernel

    def wrong(seed: int) -> bool:
        try:
            return not right(seed, kernel, monkeypatch)
        except (EmulationError, TypeError):
            return True

    assert any(wrong(seed) for seed in range(12))
