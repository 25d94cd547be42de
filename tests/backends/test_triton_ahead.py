"""Every Triton launch compiles for GPUs that are not here, fits one block's shared memory, and hardly spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

DEVICES = ("A100", "L40S", "H200", "B200", "RTX5090")
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


@cache
def launches(device: str) -> list[dict[str, Any]]:
    """The report for one device. Compiling needs a process in which Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.triton_ahead", "--device", device]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=580)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return [json.loads(line) for line in answer.stdout.splitlines()]


@pytest.mark.parametrize("device", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in DEVICES])
class TestAheadOfTime:
    def test_every_case_compiles(self, device: str) -> None:
        assert len(launches(device)) >= FEWEST_LAUNCHES

    def test_every_launch_is_that_of_a_record(self, device: str) -> None:
        assert [row for row in launches(device) if row["record"] is None] == []

    def test_fits_shared_memory(self, device: str) -> None:
        assert [row for row in launches(device) if not row["fits"]] == []

    def test_hardly_a_launch_spills_registers(self, device: str) -> None:
        rows = [row for row in launches(device) if (device, row["kernel"]) not in MEASURED_FASTER]
        spilling = [row for row in rows if row["spill_bytes"]]
        assert len(spilling) <= MOST_LAUNCHES_THAT_SPILL * len(launches(device)), spilling
        assert max((row["spill_bytes"] for row in spilling), default=0) <= MOST_SPILLED_BYTES, spilling

    def test_prefill_uses_the_matrix_instructions_of_the_generation(self, device: str) -> None:
        for row in launches(device):
            if row["kernel"] == "prefill_kernel" and "float32" not in row["case"]:
                assert MATRIX_INSTRUCTION[device] in row["instructions"], row

    def test_grouped_products_use_the_matrix_instructions_of_the_generation(self, device: str) -> None:
        for row in launches(device):
            if row["kernel"] == "grouped_gemm_kernel" and "fp32" not in row["case"]:
                small = any(
                    name in row["case"] for name in ("fp16 rows", "fp8 blocks, odd", "mxfp8 by mxfp8, odd")
                )  # tiles of less than 64 rows
                wanted = "mma.sync" if small else MATRIX_INSTRUCTION[device]
                assert wanted in row["instructions"], row

    def test_decode_uses_matrix_instructions(self, device: str) -> None:
        for row in launches(device):
            if row["kernel"] == "split_kernel" and "float32" not in row["case"]:
                assert row["instructions"], row

    def test_float8_products_use_the_matrix_instructions_of_the_generation_however_few_the_rows(self, device) -> None:
        rows = [row for row in launches(device) if row["kernel"] == "product_kernel"]
        assert rows
        assert [row for row in rows if MATRIX_INSTRUCTION[device] not in row["instructions"]] == []

    def test_logits_and_chunks_use_the_matrix_instructions_of_the_generation(self, device: str) -> None:
        kernels = ("logits_kernel", "paged_logits_kernel", "chunk_kernel")
        rows = [row for row in launches(device) if row["kernel"] in kernels and "float32" not in row["case"]]
        assert {row["kernel"] for row in rows} == set(kernels)
        for row in rows:
            assert MATRIX_INSTRUCTION[device] in row["instructions"], row

    def test_latent_attention_uses_those_of_the_generation_where_heads_are_many(self, device: str) -> None:
        rows = [row for row in launches(device) if row["kernel"] == "latent_kernel" and "float32" not in row["case"]]
        assert rows
        for row in rows:
            assert row["instructions"], row
            if row["case"] in ("mla 128 heads", "mla 128 heads, sparse", "mla 256 + 64"):
                assert MATRIX_INSTRUCTION[device] in row["instructions"], row

    def test_experts_use_the_matrix_instructions_of_the_generation(self, device: str) -> None:
        rows = [row for row in launches(device) if row["kernel"] == "experts_kernel" and "fp32" not in row["case"]]
        assert rows
        for row in rows:
            assert row["instructions"], row
            if "4096 tokens" in row["case"]:
                assert MATRIX_INSTRUCTION[device] in row["instructions"], row
