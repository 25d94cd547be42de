"""FlashInfer's grouped products keep the contract of `grouped_gemm`, with ones of torch that find groups by address."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.flashinfer import kernels as records
from kernelhub.backends.flashinfer.calls import taking
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.ops.gemm.grouped.adapter import GroupedOperands
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs
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
    def test_limits_are_reported(self, device, facets, codes) -> None:
        assert rejected(self.kernel, device, **facets) == codes


class TestGroupwise(OnFake, GroupedGemmContract):
    kernel = "flashinfer.groupwise"
    formats = ("block",)
    awkward_k = 256
    powers_of_two = False

    def inputs(self, **changes: Any) -> dict[str, Any]:
        shape = {"n": 256, "k": 256, "format": "block", "powers_of_two": self.powers_of_two, "device": "cpu"}
        return grouped_gemm_inputs(**shape | changes)

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs()
        want = self.run(arguments)
        moved = dict(arguments)
        for key in ("a", "b", "a_scale", "b_scale"):
            value = arguments[key]
            raw = value.view(torch.uint8) if value.element_size() == 1 else value
            moved[key] = raw.transpose(-1, -2).contiguous().transpose(-1, -2).view(value.dtype)
        wide = torch.full((want.shape[0], 512), torch.nan, dtype=want.dtype)
        self.check(self.run(moved, out=wide[:, ::2]), arguments)
        assert wide[:, 1::2].isnan().all()

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        plan = kernelhub.grouped_gemm.prepare(**arguments, backend=self.kernel)
        assert torch.equal(plan.run(**arguments)[:25], self.run(arguments)[:25])

    def test_no_rows_give_an_empty_result(self) -> None:
        assert self.run(self.inputs(sizes=(0, 0), spare=0)).shape == (0, 256)
        assert self.run(self.inputs(sizes=(0, 0), spare=0, masked=True)).shape == (2, 0, 256)

    def test_values_of_other_groups_do_not_reach_a_row(self) -> None:
        arguments = self.inputs(sizes=(3, 20, 2))
        want = self.run(arguments)
        arguments["b_scale"][1] = torch.nan if not self.powers_of_two else arguments["b_scale"][0]
        got = self.run(arguments)
        assert torch.equal(got[:3], want[:3])
        assert torch.equal(got[23:25], want[23:25])

    def test_explain_reads_the_call(self) -> None:
        selection = kernelhub.grouped_gemm.explain(**self.inputs(), backend=self.kernel)
        assert selection.selected == self.kernel

    @pytest.mark.parametrize("lengths", NONSENSE)
    @pytest.mark.parametrize("masked", [False, True])
    def test_lengths_that_make_no_sense_are_cut(self, masked, lengths) -> None:
        """Whatever they are, the library is given groups that lie within its rows: its model looks."""
        arguments = self.inputs(sizes=(5, 0, 19, 1), masked=masked, spare=0)
        plan = kernelhub.grouped_gemm.prepare(**arguments, backend=self.kernel)
        name = "group_sizes" if masked else "offsets"
        moved = torch.tensor(lengths, dtype=torch.int32)
        zeros = torch.zeros(arguments["a"].shape).to(arguments["a"].dtype)  # no row is poisoned, whoever's it is
        scales = torch.full(arguments["a_scale"].shape, 2.0).to(arguments["a_scale"].dtype)
        out = torch.full((*zeros.shape[:-1], 256), 7.0, dtype=torch.bfloat16)
        plan.adapter.launch(operands(arguments | {name: moved, "a": zeros, "a_scale": scales}), out)
        assert ((out == 0) | (out == 7)).all()

    @pytest.mark.parametrize(
        ("device", "facets", "codes"),
        [
            ("B200", {}, set()),
            ("B300", {"masked": True, "out_dtype": "float16"}, set()),
            ("B200", {"a_scale": "group_e8m0", "b_scale": "block_e8m0"}, set()),
            ("H200", {}, {"capability"}),
            ("RTX5090", {}, {"capability"}),
            ("B200", {"a_scale": "token", "b_scale": "channel"}, {"value"}),
            ("B200", {"n": 192}, {"divisibility"}),
            ("B200", {"k": 192}, {"divisibility"}),
            ("B200", {"out_dtype": "float32"}, {"dtype"}),
        ],
    )
    def test_limits_are_reported(self, device, facets, codes) -> None:
        fp8 = {"a_dtype": "float8_e4m3fn", "b_dtype": "float8_e4m3fn", "a_scale": "group", "b_scale": "block"}
        assert rejected(self.kernel, device, **fp8 | facets) == codes


class TestGroupwiseOfPowersOfTwo(TestGroupwise):
    powers_of_two = True
    test_case = None  # `TestGroupwise` runs the op's cases of these scales too


def test_a_function_that_takes_something_else_is_refused_with_what_it_takes() -> None:
    def moved(b: int, a: int) -> None: ...

    assert taking(moved, ("b", "a")) is moved
    with pytest.raises(ImportError, match=r"moved takes \(b, a\), not \(a, b\)"):
        taking(moved, ("a", "b"))
