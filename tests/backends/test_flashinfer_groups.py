"""FlashInfer's grouped products keep the contract of `grouped_gemm`, with ones of torch that find groups by address."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.flashinfer import kernels as records
from kernelhub.backends.flashinfer.compiled import taking
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.ops.gemm.grouped.adapter import GroupedOperands
from kernelhub.ops.gemm.grouped.problem import GroupedGemmProblem
from kernelhub.probes.device import simulated
from tests.backends.test_flashinfer import OnFake
from tests.contract.grouped_gemm import GroupedGemmContract

NONSENSE = ((9, 3, 40, 2), (-5, 10**6, 0, 7), (0, 0, 0, -1))


def operands(arguments: dict[str, Any]) -> GroupedOperands:
    return GroupedOperands(*(arguments.get(name) for name in GroupedOperands._fields))


def rejected(name: str, device: str, **facets: Any) -> set[str]:
    kernel = next(kernel for kernel in records.KERNELS if kernel.name == name)
    problem = GroupedGemmProblem(device=simulated(device), **facets)
    machine = SimulatedMachine({"flashinfer": "0.6.18.post1"})
    found = (constraint.reject(problem, machine) for constraint in kernel.constraints)
    return {rejection.code for rejection in found if rejection}


class TestSegments(OnFake, GroupedGemmContract):
    kernel = "flashinfer.segments"
    formats = ("bfloat16", "float16")
    fewest_cases = 30

    @pytest.mark.parametrize("lengths", NONSENSE)
    @pytest.mark.parametrize("masked", [False, True])
    def test_lengths_that_make_no_sense_write_nothing_outside(self, masked, lengths) -> None:
        arguments = self.inputs(sizes=(5, 0, 19, 1), masked=masked, spare=0)
        plan = kernelhub.grouped_gemm.prepare(**arguments, backend=self.kernel)
        shape = (*arguments["a"].shape[:-1], 192)
        count = torch.Size(shape).numel()
        memory = torch.full((count + 4096,), 7.0, dtype=torch.bfloat16)
        name = "group_sizes" if masked else "offsets"
        moved = torch.tensor(lengths, dtype=torch.int32)
        plan.adapter.launch(operands(arguments | {name: moved}), memory[2048:][:count].view(shape))
        assert (memory[:2048] == 7).all()
        assert (memory[2048 + count :] == 7).all()

    def test_rows_of_no_group_keep_what_a_result_with_gaps_holds(self) -> None:
        arguments = self.inputs(sizes=(3, 0, 2), spare=4)
        wide = torch.full((9, 384), 5.0, dtype=torch.bfloat16)
        self.run(arguments, out=wide[:, ::2])
        assert (wide[5:] == 5).all()
        assert not (wide[:5, ::2] == 5).all()

    @pytest.mark.parametrize(
        ("device", "facets", "codes"),
        [
            ("H200", {}, set()),
            ("H200", {"masked": True}, set()),
            ("H200", {"a_dtype": "float16", "b_dtype": "float16", "out_dtype": "float16"}, set()),
            ("B200", {}, {"capability"}),
            ("A100", {}, {"capability"}),
            ("H200", {"out_dtype": "float32"}, {"dtype"}),
            ("H200", {"a_dtype": "float32", "b_dtype": "float32", "out_dtype": "float32"}, {"dtype"}),
            ("H200", {"n": 1540}, {"divisibility"}),
            ("H200", {"k": 2044}, {"divisibility"}),
        ],
    )
    def test_limits_are_told(self, device, facets, codes) -> None:
        assert rejected(self.kernel, device, **facets) == codes


def test_a_function_that_takes_something_else_is_refused_with_what_it_takes() -> None:
    def moved(b: int, a: int) -> None: ...

    assert taking(moved, ("b", "a")) is moved
    with pytest.raises(ImportError, match=r"moved takes \(b, a\), not \(a, b\)"):
        taking(moved, ("a", "b"))
