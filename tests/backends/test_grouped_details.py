"""What the contract does not show of grouped products: other GPUs' tiles, and lengths that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.torch.gemm.grouped.per_group import PerGroup
from kernelhub.backends.triton.gemm.grouped.adapter import Grouped
from kernelhub.backends.triton.gemm.grouped.tiles import FEW, MANY, SOME, rows_of_a_tile, tiles
from kernelhub.ops.gemm.grouped.adapter import GroupedOperands
from kernelhub.ops.gemm.grouped.inputs import PAIRS, grouped_gemm_inputs
from kernelhub.ops.gemm.grouped.problem import GroupedGemmProblem
from kernelhub.ops.gemm.grouped.tolerance import error_allowed
from kernelhub.probes.device import simulated
from tests.conftest import DEVICE, HAS_GPU

pytestmark = pytest.mark.device
FORMATS = ("bfloat16", "float16", "float32", "tensor", "channel", "block", "nvfp4", "mxfp4", *PAIRS)


def operands_of(arguments: dict[str, Any]) -> GroupedOperands:
    return GroupedOperands(*(arguments.get(name) for name in GroupedOperands._fields))


def problem_of(arguments: dict[str, Any], device: str | None = None) -> GroupedGemmProblem:
    device_facts = None if device is None else simulated(device)
    return kernelhub.grouped_gemm.explain(**arguments, device=device_facts).problem


def interpreted_as(problem: GroupedGemmProblem, rows: int) -> tuple[Any, ...]:
    """What Triton's interpreter sees of a device in a call of so many rows: what the kernel is given, but for warps
    and stages."""
    adapter = Grouped(problem)
    tile = tiles(problem, rows_of_a_tile(problem, rows))
    sizes = tile.block_m, tile.block_n, tile.block_k, tile.swap
    return (*sizes, repr(sorted(adapter._static.items())), adapter._decoded, adapter._quads)


@pytest.mark.skipif(HAS_GPU, reason="tiles of GPUs that are not here are interpreted")
@pytest.mark.parametrize("name", FORMATS)
def test_every_tile_of_other_gpus_gives_the_reference(name: str) -> None:
    """Each once that the interpreter can tell apart, with groups of more rows than a tile, of fewer, and of none."""
    for more in ({}, {"a_dtype": torch.float16}) if name in ("nvfp4", "mxfp4") else ({},):
        seen = set()
        for sizes, chosen in (((17, 0, 3), FEW), ((65, 0, 3), SOME), ((129, 3), MANY)):
            arguments = grouped_gemm_inputs(sizes=sizes, format=name, n=136, k=160, spare=0, **more)
            want = kernelhub.grouped_gemm.reference(**arguments, dtype=torch.float64)
            for device in ("A100", "L40S", "H200", "B200", "RTX5090"):
                problem = problem_of(arguments, device)
                assert rows_of_a_tile(problem, sum(sizes)) == chosen
                alike = interpreted_as(problem, sum(sizes))
                if alike in seen:
                    continue
                seen.add(alike)
                out = torch.full((sum(sizes), 136), torch.nan, dtype=getattr(torch, problem.out_dtype))
                Grouped(problem).launch(operands_of(arguments), out)
                assert bool(((out.double() - want).abs() <= error_allowed(arguments, want, out.dtype)).all()), device


class TestTiles:
    def test_rows_of_a_tile_follow_the_rows_of_a_group(self) -> None:
        problem = kernelhub.explain("grouped_gemm", device="H200", num_groups=128).problem
        assert [rows_of_a_tile(problem, rows) for rows in (1, 2048, 4096, 9000, 1 << 17)] == [
            FEW,
            FEW,
            SOME,
            MANY,
            MANY,
        ]
        masked = kernelhub.explain("grouped_gemm", device="H200", masked=True).problem
        assert [rows_of_a_tile(masked, rows) for rows in (1, 16, 17, 4096)] == [FEW, FEW, SOME, SOME]

    def test_a_step_is_what_a_scale_is_for(self) -> None:
        for device in ("A100", "H200", "B200", "RTX5090"):
            for block_m in (FEW, SOME, MANY):
                blocks = kernelhub.explain("grouped_gemm", device=device, b_scale="block").problem
                assert tiles(blocks, block_m).block_k == 128
                assert 128 % tiles(blocks, block_m).block_n == 0
                by_row = kernelhub.explain("grouped_gemm", device=device, b_scale="mxfp4", a_dtype="float16").problem
                assert tiles(by_row, block_m).block_k == 32


class TestWrongLengths:
    """On a GPU nobody reads lengths before the launch: a kernel stays within its operands whatever they are."""

    @pytest.mark.parametrize("adapter", [PerGroup, Grouped])
    @pytest.mark.parametrize("lengths", [(5, 99, 12), (5, 3, 12), (-4, 6, 1 << 30), (9, 9, -1), (1 << 30,) * 3])
    @pytest.mark.parametrize("masked", [False, True])
    def test_nothing_beyond_the_result_is_written(self, adapter, lengths, masked) -> None:
        arguments = grouped_gemm_inputs(sizes=(5, 4, 3), n=72, k=64, spare=0, masked=masked, device=DEVICE)
        arguments["group_sizes" if masked else "offsets"] = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        problem = problem_of(grouped_gemm_inputs(sizes=(5, 4, 3), n=72, k=64, spare=0, masked=masked, device=DEVICE))
        shape = (*arguments["a"].shape[:-1], 72)
        room = torch.full((3, *shape), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        adapter(problem).launch(operands_of(arguments), room[1])
        assert room[0].isnan().all()
        assert room[2].isnan().all()
