"""The Gluon float8 product in the emulator: its contract, its tiles under many interleavings, and planted faults."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelhub.backends.gluon.gemm import scaled_sums
from kernelhub.backends.gluon.gemm.fp8 import adapter, product
from kernelhub.backends.gluon.gemm.fp8.tiles import HIGH, LOW, Tiles
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.problem import Fp8GemmProblem
from kernelhub.ops.gemm.fp8.reference import fp8_gemm_reference
from kernelhub.ops.gemm.fp8.tolerance import compare
from kernelhub.probes.device import simulated
from tests.contract.fp8_gemm import Fp8GemmContract
from tests.gluon.emulate import EmulationError
from tests.gluon.emulated import Emulated, emulated


class TestFp8Gemm(Emulated, Fp8GemmContract):
    kernel = "emulated.fp8_gemm"
    quick = True


ONE_SM = dataclasses.replace(simulated("H200"), num_sms=1)


def run(tile: Tiles, seed: int, monkeypatch: pytest.MonkeyPatch, kernel: Any = None, **inputs: Any) -> bool:
    """Whether two tiles of one program, of more steps than there are stages, give the reference."""
    monkeypatch.setattr(adapter, "tiles", lambda *_: tile)
    if kernel is not None:
        monkeypatch.setattr(adapter, "product_kernel", kernel)
    arguments = fp8_gemm_inputs(**{"tokens": tile.block_m + 6, "n": 72, "k": 784} | inputs)
    problem = Fp8GemmProblem(device=ONE_SM, scaling="block", n=72, k=784, rows="many")
    out = torch.full((tile.block_m + 6, 72), torch.nan, dtype=torch.bfloat16)
    operands = [arguments[name] for name in ("a", "b", "a_scale", "b_scale")]
    with emulated(seed):
        adapter.Fp8Gemm(problem).launch(*operands, None, out)
    return compare(out, fp8_gemm_reference, arguments, matrix_instructions=False).ok


@pytest.mark.parametrize("tile", [HIGH, LOW], ids=["256 rows", "128 rows"])
def test_every_interleaving_gives_the_reference(tile: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        assert run(tile, seed, monkeypatch)


FAULTS = {
    "the loader does not wait for an empty stage": (
        "mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)",
        "pass",
    ),
    "the loader waits for the phase before": ("((step // STAGES) & 1) ^ 1)", "(step // STAGES) & 1)"),
    "no wait for the operands": ("mbarrier.wait(full.index(s), (step // STAGES) & 1)", "pass"),
    "bytes of a alone are awaited": ("a_desc.block_type.nbytes + b_desc.block_type.nbytes", "a_desc.block_type.nbytes"),
    "the stage is released before the second product": (
        "if WAVES == 1:\n            mbarrier",
        "if True:\n            mbarrier",
    ),
    "no wait for the first product": ("p0 = warpgroup_mma_wait(0, deps=(p0,))", "pass"),
    "no fence before the result is stored": ("fence_async_shared()\n            tma_store", "tma_store"),
    "the next result does not wait for the store": ("tma.store_wait(0)\n            c =", "c ="),
    "the program ends before its store": ("    if BY_TMA:\n        tma.store_wait(0)\n\n", "\n"),
    "a turn is not passed on": ("mbarrier.arrive(turn.index(1 - WHICH), count=1)", "pass"),
    "scales of b do not change": ("nb = number(gl.load(b_scale + ahead * stride_bk_scale), B_E8M0)", "nb = nb"),
    "the scale of the last row for all": (
        "gl.minimum(row + 64 + within, end - 1)",
        "gl.maximum(row + 64 + within, end - 1)",
    ),
}


def planted(old: str, new: str, folder: Path) -> Any:
    """The kernel of copies of its modules in which a text was replaced."""
    names = {module.__name__: f"planted_{abs(hash((module.__name__, old, new)))}" for module in (scaled_sums, product)}
    found = 0
    for module in (scaled_sums, product):
        source = Path(module.__file__).read_text()
        found += old in source
        source = source.replace(old, new).replace(scaled_sums.__name__, names[scaled_sums.__name__])
        name = names[module.__name__]
        file = folder / f"{name}.py"
        file.write_text(source)
        spec = importlib.util.spec_from_file_location(name, file)
        copy = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
    assert found, old
    return copy.product_kernel


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = planted(*FAULTS[fault], tmp_path)

    def wrong(seed: int) -> bool:
        try:
            return not run(HIGH, seed, monkeypatch, kernel)
        except (EmulationError, TypeError):
            return True

    assert any(wrong(seed) for seed in range(25))
