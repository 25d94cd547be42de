"""The Gluon experts in bfloat16 and float16 in the emulator: contract, tiles, operands as users have them, faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.backends.gluon.gemm import halves_sums
from kernelhub.backends.gluon.moe import halves, halves_adapter
from kernelhub.backends.gluon.moe.halves_adapter import ExpertsOfHalves
from kernelhub.backends.shared import sorted_sizes
from kernelhub.ops.moe.experts.adapter import Values
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.problem import PLAIN, ExpertsProblem
from kernelhub.ops.moe.experts.tolerance import compare
from kernelhub.ops.moe.experts.weights import Matrix
from tests.contract.experts import ExpertsContract
from tests.gluon.emulate import EmulationError
from tests.gluon.emulated import Emulated, emulated, on_the_cpu
from tests.gluon.planted import planted
from tests.gluon.test_experts import ONE_SM


class TestExpertsOfHalves(Emulated, ExpertsContract):
    kernel = "emulated.experts_halves"
    labels = (
        *("0 tokens, plain, 5 experts", "17 tokens, plain, 5 experts", "90 tokens, plain, 5 experts"),
        *("float16, plain, 5 experts", "w2_bias, plain, 5 experts", "ids: all to the last, 5 experts"),
        *("1 of 1 experts", "64 by 64, plain"),
        *(f"activation {name}, plain, 5 experts" for name in ("gelu", "gelu_tanh", "swiglu_oai", "swiglu_step")),
    )
    formats = (PLAIN,)
    widest = torch.float16


@pytest.mark.usefixtures("clean_hub")
class TestOperands:
    """Calls as engines make them."""

    sizes: ClassVar[dict[str, int]] = {
        "num_experts": 6,
        "hidden_size": 136,
        "intermediate_size": 72,
    }  # no multiples of a step or a tile

    def run(self, arguments: dict[str, Any], **more: Any) -> torch.Tensor:
        with on_the_cpu(), emulated():
            return kernelhub.fused_moe(**arguments, **more, backend="emulated.experts_halves")

    @pytest.mark.parametrize("top_k", [1, 3, 6])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_any_number_of_choices(self, top_k: int, dtype: torch.dtype) -> None:
        arguments = moe_inputs(tokens=23, weights=PLAIN, dtype=dtype, top_k=top_k, **self.sizes)
        assert compare(self.run(arguments), arguments).ok

    def test_tokens_between_nan_that_overlap_or_repeat(self) -> None:
        arguments = moe_inputs(tokens=9, weights=PLAIN, top_k=2, **self.sizes)
        x, hidden = arguments["x"], 136
        wide = torch.full((11, hidden + 24), torch.nan, dtype=x.dtype)
        wide[1:10, 8 : 8 + hidden] = x
        for given in (
            wide[1:10, 8 : 8 + hidden],  # read where they are: what lies behind a row is NaN
            torch.cat([x.flatten(), x.flatten()])[3:].as_strided((9, hidden), (64, 1)),  # not at 16 bytes
            x.flatten().as_strided((9, hidden), (64, 1)),  # rows that overlap
            x[:1].expand(9, hidden),
        ):
            changed = arguments | {"x": given}
            assert compare(self.run(changed), arguments | {"x": given.clone()}).ok

    def test_weights_of_experts_that_nobody_chose_may_be_nan(self) -> None:
        arguments = moe_inputs(tokens=150, weights=PLAIN, top_k=1, **self.sizes)
        ids = arguments["topk_ids"]
        ids[ids == 2], ids[ids == 5], ids[7] = 3, 0, -1
        want = self.run(arguments)
        assert compare(want, arguments).ok
        assert not want[7].any()
        for name in ("w13", "w2"):
            arguments[name] = arguments[name].clone()
            arguments[name][[2, 5]] = torch.nan
        assert torch.equal(self.run(arguments), want)

    def test_more_tokens_than_a_round_holds_give_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        arguments = moe_inputs(tokens=11, weights=PLAIN, top_k=2, **self.sizes)
        arguments["residual"] = torch.randn_like(arguments["x"])
        want = self.run(arguments)
        monkeypatch.setattr(sorted_sizes, "MOST_ADDED", 4 * 2 * 136 * 2)  # 4 tokens
        assert torch.equal(self.run(arguments), want)

    def test_no_pair_is_here(self) -> None:
        arguments = moe_inputs(tokens=4, weights=PLAIN, top_k=2, **self.sizes)
        assert not self.run(arguments | {"topk_ids": torch.full((4, 2), -1, dtype=torch.int32)}).any()


def right(seed: int, kernel: Any, monkeypatch: pytest.MonkeyPatch, rows: int = 128) -> bool:
    """Whether both products of one program give the reference: full tiles, one of few rows, more steps than stages."""
    monkeypatch.setattr(halves_adapter, "experts_of_halves_kernel", kernel)
    sizes: ClassVar[dict[str, int]] = {"num_experts": 3, "top_k": 1, "hidden_size": 392, "intermediate_size": 136}
    arguments = moe_inputs(tokens=135, weights=PLAIN, **sizes)
    ids = arguments["topk_ids"]
    arguments["topk_weights"].fill_(1.0)
    ids.fill_(0)
    ids[[3, 133]], ids[70] = 2, 1
    ours = ExpertsOfHalves(ExpertsProblem(device=ONE_SM, weights=PLAIN, **sizes))
    made = torch.empty(135, 136).bfloat16(), torch.empty(135, 392).bfloat16()
    # Rows as wide as a step would have them, and NaN behind their columns.
    x = torch.full((135, 448), torch.nan).bfloat16()
    x[:, :392] = arguments["x"]
    with emulated(seed):
        placed = ours._sort(ids, None, rows)
        whole = (arguments["topk_weights"], placed, Values())
        ours._multiply(True, rows, x[:, :392], Matrix(arguments["w13"], None, None, None), *whole, made[0])
        ours._multiply(False, rows, made[0], Matrix(arguments["w2"], None, None, None), *whole, made[1])
    some = {name: arguments[name][60:] for name in ("x", "topk_ids", "topk_weights")}
    return compare(made[1][placed.places[60:].long()], arguments | some).ok


@pytest.mark.parametrize("rows", [128, 64])
def test_every_interleaving_gives_the_reference(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        assert right(seed, halves.experts_of_halves_kernel, monkeypatch, rows)


FAULTS = {
    "the loader does not wait for an empty stage": (
        "mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)",
        "pass",
    ),
    "the loader counts the bytes of one block": (
        "full.index(s), 2 * b_desc.block_type.nbytes",
        "full.index(s), b_desc.block_type.nbytes",
    ),
    "columns behind the last are multiplied": (", mask=there)", ")"),
    "a tile of few rows has one half of its columns twice": ("alpha, limit, 0, WHICH * 64,", "alpha, limit, 0, 0,"),
    "rows of a tile are those of its first token": ("rows = token[:, None]", "rows = token[:1, None]"),
    "gate and up trade places": ("joined(sums0, sums1,", "joined(sums1, sums0,"),
}  # fmt: skip
FAULTS_OF_SUMS = {
    "no wait for the operands": ("mbarrier.wait(full.index(s), (step // STAGES) & 1)", "pass"),
    "no fence before rows that threads copied": ("            fence_async_shared()", "            pass"),
    "a stage is passed on while it is multiplied": (
        "warpgroup_mma_wait(2, deps=(sums0, sums1))",
        "warpgroup_mma_wait(4, deps=(sums0, sums1))",
    ),
}


@pytest.mark.parametrize("fault", [*FAULTS, *FAULTS_OF_SUMS])
def test_planted_faults_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = halves.experts_of_halves_kernel
    if fault in FAULTS:
        kernel = planted(halves, *FAULTS[fault], tmp_path).experts_of_halves_kernel
    else:
        sums_of_two = planted(halves_sums, *FAULTS_OF_SUMS[fault], tmp_path).sums_of_two
        monkeypatch.setattr(halves, "sums_of_two", sums_of_two)

    def wrong(seed: int) -> bool:
        try:
            return not right(seed, kernel, monkeypatch)
        except (EmulationError, ValueError):
            return True

    assert any(wrong(seed) for seed in range(12))
