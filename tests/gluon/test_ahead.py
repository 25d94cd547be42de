"""Every Gluon launch compiles for sm_90a, fits shared memory, spills nothing in a loop, and is not serialised.

By default the first case of each family is compiled; `make ahead` (`pytest -m ahead`) compiles all of them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from packaging.version import Version

from tests.gluon.ahead import idle_barriers

MOST_SHARED = 232_448  # bytes that a block may have on sm_90
WITHOUT_PRODUCTS = {"merge_kernel", "count_kernel", "place_kernel", "code_kernel", "sum_kernel"}
# Words that a loop of 780 to 1140 instructions spills, and loads of what it does not change, where ptxas prefers that
# to a register. With Triton 3.8.0, which is not the project's compiler, the decode of 128 heads spills 2 words and that
# of lists over float8 loads 14; with 3.9.0 a prefill spills 1. 3.6.0 and 3.7.1 spill none.
_LATER = Version(importlib.metadata.version("triton")) >= Version("3.8")
MOST_STORES = 2 if _LATER else 0
LOADS_THAT_COST_NOTHING = 14 if _LATER else 8
# 3.6.0 spills one in the loop with masks, of which a tile has a step or none.
SPILLS_A_WORD = "pipelined prefill, pages of 16"


def launches(every: bool) -> list[dict[str, Any]]:
    """One report. Compiling needs a process in which Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.gluon.ahead"]
    answer = subprocess.run(
        command if every else [*command, "--first"], capture_output=True, text=True, env=environment, timeout=580
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return [json.loads(line) for line in answer.stdout.splitlines()]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.ahead)], ids=["first", "every case"])
def test_launches_compile_to_what_they_were_written_for(every: bool) -> None:
    rows = launches(every)
    assert rows
    for row in rows:
        assert row["record"] is not None, row
        assert row["shared_memory_bytes"] <= MOST_SHARED, row
        assert row["serialised"] == [], row
        assert row["idle_barriers"] == [], row
        if row["kernel"] in WITHOUT_PRODUCTS:
            assert row["spill_store_bytes"] == 0, row
            continue
        assert row["wgmma"] > 0, row
        assert row["tma_loads"] > 0, row
        assert row["register_moves"] > 0, row
        assert row["loops"] or not row["listed"], row
        for loop in row["loops"]:
            assert loop["stores"] <= max(MOST_STORES, row["case"] == SPILLS_A_WORD), row
            assert loop["loads"] <= LOADS_THAT_COST_NOTHING, row


def test_a_barrier_that_no_warp_group_uses_is_reported() -> None:
    text = """
    %full = ttg.local_alloc : () -> !ttg.memdesc<4x1xi64, #shared1, #smem, mutable>
    %empty = ttg.local_alloc : () -> !ttg.memdesc<4x1xi64, #shared1, #smem, mutable>
    %known = ttg.local_alloc : () -> !ttg.memdesc<1xi64, #shared1, #smem, mutable>
    %turn = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared1, #smem, mutable>
    %scratch = ttg.local_alloc : () -> !ttg.memdesc<2x64xf32, #shared2, #smem, mutable>
    %turn_0 = ttg.memdesc_index %turn[%c0] : !ttg.memdesc<2x1xi64> -> !ttg.memdesc<1xi64>
    %first = ttg.memdesc_index %empty[%c0] : !ttg.memdesc<4x1xi64> -> !ttg.memdesc<1xi64>
    ttng.init_barrier %turn_0, 1
    ttg.warp_specialize(%full, %first, %out) attributes {requestedRegisters = array<i32: 40>}
    """
    assert idle_barriers(text) == ["%known", "%turn"]
