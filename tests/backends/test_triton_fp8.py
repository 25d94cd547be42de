"""Details of the Triton float8 product: the way of float8 instructions, parts of K, few rows and many."""

from __future__ import annotations

import pytest
import torch

import kernelhub
from kernelhub.backends.triton.gemm.fp8 import adapter
from kernelhub.backends.triton.gemm.fp8.tiles import FEW, splits_of, tiles
from kernelhub.backends.triton.requirements import has_float8
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.problem import SCALINGS
from kernelhub.ops.gemm.fp8.tolerance import compare
from kernelhub.probes.device import SIMULATED
from kernelhub.runtime.counters import MOST, counters_of
from tests.conftest import DEVICE

GPUS = [name for name, device in SIMULATED.items() if device.vendor == "nvidia"]


@pytest.mark.parametrize("scaling", ["row", "block", "mx"])
@pytest.mark.parametrize("tokens", [3, FEW + 6])
def test_products_of_float8_itself_are_right(tokens: int, scaling: str, monkeypatch) -> None:
    """As from sm_89 on, here in the interpreter."""
    if DEVICE == "cuda":
        pytest.skip("the GPU's own way is what the contract tests run: 6 cases")
    monkeypatch.setattr(adapter, "has_float8", lambda device: True)
    for k in (256, 300):
        arguments = fp8_gemm_inputs(tokens=tokens, n=136, k=k, scaling=scaling, bias=True)
        out = kernelhub.fp8_gemm(**arguments, backend="triton")
        assert compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=False).ok


@pytest.mark.parametrize("parts", [2, 5, 16])
@pytest.mark.parametrize("scaling", ["row", "block", "mx"])
def test_parts_of_k_add_up_to_the_whole(scaling: str, parts: int, monkeypatch) -> None:
    monkeypatch.setattr(adapter, "splits_of", lambda *_: parts)
    for tokens, k in ((3, 2064), (FEW + 6, 2048)):
        arguments = fp8_gemm_inputs(tokens=tokens, n=72, k=k, scaling=scaling, bias=True, device=DEVICE)
        out = kernelhub.fp8_gemm(**arguments, backend="triton")
        agreement = compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=DEVICE == "cuda")
        assert agreement.ok, str(agreement)


@pytest.mark.parametrize("scaling", ["row", "block", "mx"])
def test_one_launch_has_the_bits_of_two(scaling: str, monkeypatch) -> None:
    monkeypatch.setattr(adapter, "splits_of", lambda *_: 5)
    given = fp8_gemm_inputs(tokens=FEW + 6, n=72, k=2048, scaling=scaling, bias=True, device=DEVICE)
    given["out"] = torch.empty(72, FEW + 6, dtype=torch.bfloat16, device=DEVICE).t()
    results = []
    for one in (True, True, False):
        monkeypatch.setattr(adapter, "ONE_LAUNCH_ROWS", 1 << 20 if one else 0)
        kernelhub.fp8_gemm.op._forget()
        given["out"].fill_(torch.nan)
        results.append(kernelhub.fp8_gemm(**given, backend="triton").clone())
        counters = counters_of(given["out"], MOST)
        assert counters is not None
        assert not counters.any(), "zero for the next launch"
    kernelhub.fp8_gemm.op._forget()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", GPUS)
def test_few_tiles_are_split_until_the_device_is_busy_and_many_never(name: str) -> None:
    device = SIMULATED[name]
    assert splits_of(device, 10 * device.num_sms, 1 << 20) == 1
    assert splits_of(device, 1, 128) == 1
    for programs in (1, 9, 36, device.num_sms):
        for k in (1024, 7168, 28672):
            splits = splits_of(device, programs, k)
            assert 1 <= splits <= 16
            assert splits == 1 or programs * splits <= 2 * device.num_sms
            assert splits == 1 or k // splits >= 512


@pytest.mark.parametrize("name", GPUS)
def test_weights_are_the_long_side_where_rows_are_few(name: str) -> None:
    device = SIMULATED[name]
    assert has_float8(device) == (device.capability >= (8, 9))
    for scaling in SCALINGS:
        for rows in (1, 16, 17, 33, FEW):
            tile = tiles(device, scaling, rows, 7168, 18432)
            assert tile.swapped
            assert tile.block_m < rows + 16 or tile.block_m == 16 or tile.block_m < 2 * rows
            assert tile.block_n >= 64
        assert not tiles(device, scaling, 4096, 7168, 18432).swapped


def test_the_workspace_is_what_parts_take() -> None:
    arguments = fp8_gemm_inputs(tokens=1, n=128, k=2048, device=DEVICE)
    plan = kernelhub.fp8_gemm.prepare(**arguments, backend="triton")
    told = plan.workspace_bytes(num_tokens=100)
    taken = []
    for tokens in range(1, 101):
        splits = plan.adapter._cut(tokens)[2]
        taken.append(splits * tokens * 128 * 4 if splits > 1 else 0)
    assert told >= max(taken)
    assert told <= 16 * 100 * 128 * 4
