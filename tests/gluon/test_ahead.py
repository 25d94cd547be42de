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
from tests.gluon.registers import unwritten

MOST_SHARED = 232_448  # bytes that a block may have on sm_90
WITHOUT_PRODUCTS = {"merge_kernel", "count_kernel", "place_kernel", "code_kernel", "sum_kernel"}
# Loads of what a loop of 1140 instructions does not change, where ptxas prefers that to a register: with Triton 3.8.0,
# which is not the project's compiler, the decode of lists over float8 has 14.
_LATER = Version(importlib.metadata.version("triton")) >= Version("3.8")
LOADS_THAT_COST_NOTHING = 14 if _LATER else 8


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
        assert row["unwritten"] == [], row
        if row["kernel"] in WITHOUT_PRODUCTS:
            assert row["spill_store_bytes"] == 0, row
            continue
        assert row["wgmma"] > 0, row
        assert row["tma_loads"] > 0, row
        assert row["register_moves"] > 0, row
        assert row["loops"] or not row["listed"], row
        for loop in row["loops"]:
            assert loop["stores"] == 0, row
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


TWO_LOOPS = """
        /*0000*/                   ULDC UR4, c[0x0][0x210] ;
        /*0010*/                   UISETP.GT.AND UP0, UPT, UR4, 0x1, UPT ;
        /*0020*/                   PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0 ;
        /*0030*/              @!P0 BRA `(.L_x_2) ;
        /*0040*/                   UIADD3 UR16, UP0, UR4, 0x2, URZ ;
        /*0050*/                   UMOV UR17, 0x40000040 ;
.L_x_1:
        /*0060*/                   UIADD3.64 UR18, UR16, 0x2, URZ ;
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24 ;
        /*0080*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0090*/                   BRX R2 -0x40    (*"BRANCH_TARGETS .L_x_3,.L_x_4"*);
.L_x_3:
        /*00a0*/               @P2 R2UR UR40, R2 ;
        /*00b0*/                   UTMALDG.2D [UR40], [UR4] ;
        /*00c0*/                   EXIT ;
.L_x_4:
        /*00d0*/                   UIADD3.64 UR20, UR16, 0x2, URZ ;
        /*00e0*/                   HGMMA.64x128x16.F32.BF16 R88, R156, gdesc[UR18].tnspB, R88 ;
        /*00f0*/                   EXIT ;
"""


def test_a_register_that_a_path_has_not_written_is_reported() -> None:
    """The second loop uses what was computed before the first, which may be skipped."""
    assert unwritten(TWO_LOOPS) == ["UIADD3.64 UR20, UR16, 0x2, URZ"]
    right = TWO_LOOPS.replace(".L_x_4:", ".L_x_4:\n/*00c8*/ UMOV UR16, UR4 ;\n/*00cc*/ UMOV UR17, URZ ;")
    assert unwritten(right) == []
    assert unwritten("") == []
    skipped = right.replace("UMOV UR17, 0x40000040 ;", "NOP ;")
    assert unwritten(skipped) == [
        "UIADD3.64 UR18, UR16, 0x2, URZ",
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24",
    ]
