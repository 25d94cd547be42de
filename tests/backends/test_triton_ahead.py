"""Every Triton launch compiles for GPUs that are not here, fits one block's shared memory, and hardly spills.

The full tier compiles each kernel once for an H200. `make ahead` (`pytest -m ahead`) compiles each case for that, an
A100, an L40S, a B200 and an RTX 5090: ten minutes of two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from kernelhub.backends.triton.attention.splits import HOPPER
from tests.backends.ahead.once import ONCE

DEVICES = ("A100", "L40S", "H200", "B200", "RTX5090")
ONCE_FOR = ("H200",)  # of the devices the one whose matrix instructions differ most from what all can
FEWEST_LAUNCHES = 40
# ptxas trades some registers of its own accord, which ones differs with its version: up to 112 bytes with that of
# Triton 3.6.0 for sm_80. The 256-wide prefill on sm_90
# spills up to 72 bytes and was still measured 14 % faster than the next tile, which spills nothing. A tile that
# does not fit spills hundreds of bytes to kilobytes.
MOST_SPILLED_BYTES = 128
MOST_LAUNCHES_THAT_SPILL = 0.1  # of all
# Tiles that spill more and were measured to be faster than any that do not (figures: backends/triton/mla/tiles.py).
MEASURED_FASTER = {("H200", "latent_kernel")}
MATRIX_INSTRUCTION = {"A100": "mma.sync", "L40S": "mma.sync", "H200": "wgmma", "B200": "tcgen05", "RTX5090": "mma.sync"}


def reports() -> list[Any]:
    """(device, whether of each case) for each report, on one worker of pytest-xdist each."""
    default = [(name, False) for name in ONCE_FOR]
    asked_for = [(name, True) for name in DEVICES]
    return [
        pytest.param(
            *of, id="-".join((of[0], "cases" if of[1] else "once")), marks=[pytest.mark.xdist_group(of[0]), *marks]
        )
        for several, marks in ((default, []), (asked_for, [pytest.mark.ahead]))
        for of in several
    ]


@cache
def launches(device: str, whole: bool) -> list[dict[str, Any]]:
    """One report. Compiling needs a process in which Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.triton_ahead", "--device", device]
    answer = subprocess.run(
        command if whole else [*command, "--once"], capture_output=True, text=True, env=environment, timeout=1200
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return [json.loads(line) for line in answer.stdout.splitlines()]


@pytest.mark.ahead
@pytest.mark.timeout(1300)
@pytest.mark.xdist_group("H200")
def test_each_kernel_is_among_those_compiled_once() -> None:
    """What every case launches on one GPU, the cases in `tests/backends/ahead/once.py` launch too."""
    rows = launches("H200", True)
    assert {row["case"] for row in rows} >= ONCE
    once = {(row["record"], row["kernel"]) for row in rows if row["case"] in ONCE}
    assert {(row["record"], row["kernel"]) for row in rows} - once == set()


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("device", "whole"), reports())
class TestAheadOfTime:
    def test_every_case_compiles(self, device: str, whole: bool) -> None:
        assert len(launches(device, whole)) >= FEWEST_LAUNCHES

    def test_every_launch_is_that_of_a_record(self, device: str, whole: bool) -> None:
        assert [row for row in launches(device, whole) if row["record"] is None] == []

    def test_fits_shared_memory(self, device: str, whole: bool) -> None:
        assert [row for row in launches(device, whole) if not row["fits"]] == []

    def test_triton_changes_no_constant(self, device: str, whole: bool) -> None:
        assert [row for row in launches(device, whole) if row["lost_constants"]] == []

    def test_hardly_a_launch_spills_registers(self, device: str, whole: bool) -> None:
        rows = [row for row in launches(device, whole) if (device, row["kernel"]) not in MEASURED_FASTER]
        spilling = [row for row in rows if row["spill_bytes"]]
        assert len(spilling) <= MOST_LAUNCHES_THAT_SPILL * len(launches(device, whole)), spilling
        assert max((row["spill_bytes"] for row in spilling), default=0) <= MOST_SPILLED_BYTES, spilling

    def test_prefill_uses_the_matrix_instructions_of_the_generation(self, device: str, whole: bool) -> None:
        for row in launches(device, whole):
            if row["kernel"] == "prefill_kernel" and "float32" not in row["case"]:
                assert MATRIX_INSTRUCTION[device] in row["instructions"], row

    def test_grouped_products_use_the_matrix_instructions_of_the_generation(self, device: str, whole: bool) -> None:
        for row in launches(device, whole):
            if row["kernel"] == "grouped_gemm_kernel" and "fp32" not in row["case"]:
                small = any(
                    name in row["case"] for name in ("fp16 rows", "fp8 blocks, odd", "mxfp8 by mxfp8, odd")
                )  # tiles of less than 64 rows
                wanted = "mma.sync" if small else MATRIX_INSTRUCTION[device]
                assert wanted in row["instructions"], row

    def test_decode_uses_matrix_instructions(self, device: str, whole: bool) -> None:
        for row in launches(device, whole):
            if row["kernel"] == "split_kernel" and "float32" not in row["case"]:
                assert row["instructions"], row

    def test_as_many_programs_of_decode_fit_as_their_rule_counts_on(self, device: str, whole: bool) -> None:
        if device != "H200":
            pytest.skip("the rule was fitted to times on sm_90")
        for case, itemsize in (("decode 128/128", 2), ("decode fp8", 1)):
            rows = [row for row in launches(device, whole) if (row["case"], row["kernel"]) == (case, "split_kernel")]
            for kind in HOPPER[itemsize, 128]:
                tiles = {"BLOCK_N": kind.tiles.block_n, "num_warps": kind.tiles.num_warps, "AHEAD": False}
                registers = {row["registers"] for row in rows if tiles.items() <= row["constants"].items()}
                assert registers or not whole, (case, tiles)
                # A multiprocessor has 65,536 registers, of which a warp takes multiples of 256.
                fitting = [65536 // (32 * kind.tiles.num_warps * -(-used // 8) * 8) for used in registers]
                assert min(fitting, default=kind.programs) >= kind.programs, (case, tiles, registers)

    def test_float8_products_use_the_matrix_instructions_of_the_generation_however_few_the_rows(
        self, device, whole
    ) -> None:
        rows = [row for row in launches(device, whole) if row["kernel"] == "product_kernel"]
        assert rows
        assert [row for row in rows if MATRIX_INSTRUCTION[device] not in row["instructions"]] == []

    def test_logits_and_chunks_use_the_matrix_instructions_of_the_generation(self, device: str, whole: bool) -> None:
        kernels = ("logits_kernel", "paged_logits_kernel", "chunk_kernel")
        rows = [row for row in launches(device, whole) if row["kernel"] in kernels and "float32" not in row["case"]]
        assert {row["kernel"] for row in rows} == set(kernels)
        for row in rows:
            assert MATRIX_INSTRUCTION[device] in row["instructions"], row

    def test_latent_attention_uses_those_of_the_generation_where_heads_are_many(self, device: str, whole: bool) -> None:
        rows = [
            row for row in launches(device, whole) if row["kernel"] == "latent_kernel" and "float32" not in row["case"]
        ]
        assert rows
        for row in rows:
            assert row["instructions"], row
            if row["case"] in ("mla 128 heads", "mla 128 heads, sparse", "mla 256 + 64"):
                assert MATRIX_INSTRUCTION[device] in row["instructions"], row

    def test_experts_use_the_matrix_instructions_of_the_generation(self, device: str, whole: bool) -> None:
        rows = [
            row for row in launches(device, whole) if row["kernel"] == "experts_kernel" and "fp32" not in row["case"]
        ]
        assert rows
        for row in rows:
            assert row["instructions"], row
            if "4096 tokens" in row["case"]:
                assert MATRIX_INSTRUCTION[device] in row["instructions"], row
