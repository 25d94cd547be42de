"""The Gluon grouped products in the emulator: their contract, tiles, orders, interleavings and planted faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.gluon.gemm import halves_sums
from kernelhub.backends.gluon.gemm.grouped import adapter, fp8, halves
from kernelhub.backends.gluon.gemm.grouped.adapter import GroupedFp8, GroupedHalves, Tile
from kernelhub.evidence.cases import CASES
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs
from tests.contract.grouped_gemm import GroupedGemmContract
from tests.gluon.emulate import EmulationError
from tests.gluon.emulated import Emulated, emulated, on_the_cpu
from tests.gluon.planted import planted

TILES = (Tile(64, 256, 64), Tile(128, 256, 64))
# Full tiles, tiles in which a group ends in either half, groups of no rows, and rows that are no group's.
SIZES = (0, 300, 0, 70, 128, 1, 40, 0)


class TestGroupedFp8(Emulated, GroupedGemmContract):
    kernel = "emulated.grouped_fp8"
    quick = True
    formats = ("block", "tensor")


class TestGroupedHalves(Emulated, GroupedGemmContract):
    kernel = "emulated.grouped_halves"
    quick = True
    formats = ("bfloat16",)


def right(seed: int, kernel: str = "grouped_halves", **inputs: Any) -> bool:
    """Whether a call gives the reference: K of more steps than stages, the last not whole, N no multiple of a tile."""
    inputs = {"sizes": SIZES, "n": 296, "k": 392} | inputs
    arguments = grouped_gemm_inputs(**inputs)
    # Memory of the allocator may hold the result of a call before, which hides what is not written.
    out = torch.full((*arguments["a"].shape[:-1], inputs["n"]), torch.nan, dtype=torch.bfloat16)
    with on_the_cpu(), emulated(seed):
        kernelhub.grouped_gemm(**arguments, out=out, backend=f"emulated.{kernel}")
    return bool(CASES["grouped_gemm"].judge({"out": out}, arguments).ok)


def taking(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupedHalves, "tile", lambda self, rows: tile)


@pytest.mark.usefixtures("clean_hub")
class TestTiles:
    @pytest.mark.parametrize("tile", TILES, ids=str)
    @pytest.mark.parametrize("masked", [False, True])
    def test_every_tile_gives_the_reference(self, tile: Tile, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        taking(tile, monkeypatch)
        assert right(0, masked=masked, bias=True)

    @pytest.mark.parametrize("tile", TILES, ids=str)
    def test_every_interleaving_gives_the_reference(self, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
        taking(tile, monkeypatch)
        assert all(right(seed, sizes=(190, 33), n=136, k=328) for seed in range(1, 4))

    @pytest.mark.parametrize("kernel", ["grouped_halves", "grouped_fp8"])
    def test_tiles_may_come_in_any_order(self, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Groups of more tiles of rows than share columns of weights, the last of which do with fewer."""
        monkeypatch.setattr(adapter, "_GROUP", 2)
        for owner in (GroupedHalves, GroupedFp8):
            monkeypatch.setattr(owner, "tile", lambda self, rows, owner=owner: LOW[owner])
        more = {} if kernel == "grouped_halves" else {"format": "block"}
        assert right(0, kernel, sizes=(3, 700, 0, 400), k=160, **more)

    def test_a_result_of_any_dtype_and_strides_beside_nan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        arguments = grouped_gemm_inputs(sizes=SIZES, n=296, k=136)
        rows = sum(SIZES)
        for tile in TILES:
            taking(tile, monkeypatch)
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                wide = torch.full((rows + 3, 320), torch.nan, dtype=dtype)
                with on_the_cpu(), emulated():
                    kernelhub.grouped_gemm(**arguments, out=wide[:, 16:312], out_dtype=dtype, backend="emulated")
                judgement = CASES["grouped_gemm"].judge({"out": wide[:, 16:312]}, arguments | {"out_dtype": dtype})
                assert judgement.ok, judgement.figures
                assert wide[rows:].isnan().all()
                assert wide[:, :16].isnan().all()
                assert wide[:, 312:].isnan().all()


LOW = {GroupedHalves: Tile(128, 256, 64), GroupedFp8: Tile(128, 128, 128)}
FAULTS: dict[str, tuple[Any, str, str]] = {
    "the loader does not wait for an empty stage": (
        fp8,
        "mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)",
        "pass",
    ),
    "the loader counts the bytes of one block": (fp8, "ACROSS * b_desc", "b_desc"),
    "both blocks of weights are the first": (fp8, "at_b + i * 128,", "at_b,"),
    "no wait for the operands": (halves_sums, "mbarrier.wait(full.index(s), (step // STAGES) & 1)", "pass"),
    "a stage is passed on while it is multiplied": (
        halves_sums,
        "warpgroup_mma_wait(2, deps=(sums0, sums1))",
        "warpgroup_mma_wait(4, deps=(sums0, sums1))",
    ),
    "a tile of few rows has one half of its columns twice": (halves, "on, 0, WHICH * 64,", "on, 0, 0,"),
    "the second block is stored in the place of the first": (halves, "column += 128", "column += 0"),
    "both warpgroups store the rows of the first": (halves, "row + WHICH * 64, size", "row, size"),
}  # fmt: skip


@pytest.mark.usefixtures("clean_hub")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taking(TILES[1], monkeypatch)
    module, *texts = FAULTS[fault]
    made = planted(module, *texts, tmp_path)
    for name in ("load_groups", "sums_of_two"):
        if hasattr(made, name) and module is not halves:
            monkeypatch.setattr(halves, name, getattr(made, name))
    if module is halves:
        monkeypatch.setattr(adapter, "grouped_halves_kernel", made.grouped_halves_kernel)

    def wrong(seed: int) -> bool:
        try:
            return not right(seed, sizes=(190, 33), n=296, k=328)
        except (EmulationError, ValueError):
            return True

    assert any(wrong(seed) for seed in range(12))
