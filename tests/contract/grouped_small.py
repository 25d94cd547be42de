"""What kernels of `grouped_gemm` for operands with scales of 16 or 32 columns must do, in whole tiles."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.ops.gemm.grouped.adapter import GroupedOperands
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs
from kernelhub.testing import KernelCase
from tests.contract.grouped_gemm import GroupedGemmContract

NONSENSE = ((9, 3, 40, 2), (-5, 10**6, 0, 7), (0, 0, 0, -1))


class SmallGroupsContract(GroupedGemmContract):
    """Of one pair of formats, sorted and masked."""

    device = "cpu"
    forms: ClassVar[tuple[bool, ...]] = (False, True)  # masked or not
    n: ClassVar[int] = 128

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        return [case for case in super().accepted_cases() if case.label.startswith(cls.formats[0])]

    def inputs(self, **changes: Any) -> dict[str, Any]:
        shape = {"n": self.n, "k": 128, "format": self.formats[0], "masked": self.forms[0], "device": "cpu"}
        return grouped_gemm_inputs(**shape | changes)

    def live(self, arguments: dict[str, Any]) -> Tensor:
        return ~kernelhub.grouped_gemm.reference(**arguments).isnan()

    def test_every_scale_counts_where_it_belongs(self) -> None:
        for masked in self.forms:
            arguments = self.inputs(masked=masked)
            live, base = self.live(arguments), self.run(arguments)
            for name in ("a_scale", "b_scale", "a_global_scale", "b_global_scale"):
                scale = arguments.get(name)
                if scale is None:
                    continue
                twice = scale.clone()
                if scale.dtype is torch.float8_e8m0fnu:
                    twice = (scale.view(torch.uint8) + 1).view(scale.dtype)
                else:
                    twice = (scale.float() * 2).to(scale.dtype)
                assert torch.equal(self.run(arguments | {name: twice})[live], base[live] * 2), name

    def test_operands_may_have_any_strides(self) -> None:
        for masked in self.forms:
            arguments = self.inputs(masked=masked)
            want, live = self.run(arguments), self.live(arguments)
            moved = dict(arguments)
            for key in ("a", "b", "a_scale", "b_scale"):
                raw = arguments[key].view(torch.uint8)
                moved[key] = raw.transpose(-1, -2).contiguous().transpose(-1, -2).view(arguments[key].dtype)
            wide = torch.full((*want.shape[:-1], 2 * self.n), torch.nan, dtype=want.dtype)
            got = self.run(moved, out=wide[..., ::2])
            assert torch.equal(got[live], want[live])
            assert wide[..., 1::2].isnan().all()

    def test_values_of_other_groups_do_not_reach_a_row(self) -> None:
        for masked in self.forms:
            arguments = self.inputs(sizes=(3, 20, 2), masked=masked)
            want, live = self.run(arguments), self.live(arguments)
            changed = arguments["b_scale"].view(torch.uint8).clone()
            changed[1] = 0x7F  # NaN of e4m3, large of e8m0
            got = self.run(arguments | {"b_scale": changed.view(arguments["b_scale"].dtype)})
            other = live.clone()
            if masked:
                other[1] = False
            else:
                other[3:23] = False
            assert torch.equal(got[other], want[other])
            assert not torch.equal(got[live], want[live])

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        for masked in self.forms:
            arguments = self.inputs(masked=masked)
            plan = kernelhub.grouped_gemm.prepare(**arguments, backend=self.kernel)
            assert plan.kernel == self.kernel
            assert plan.workspace_bytes(num_tokens=30) > 0
            live = self.live(arguments)
            assert torch.equal(plan.run(**arguments)[live], self.run(arguments)[live])

    def test_other_ways_to_hold_the_same_bits(self) -> None:
        arguments = self.inputs()
        live, want = self.live(arguments), self.run(arguments)
        for name in ("a", "b"):
            if arguments[name].dtype is torch.uint8:
                changed = arguments | {name: arguments[name].view(torch.float4_e2m1fn_x2)}
                assert torch.equal(self.run(changed)[live], want[live])
        for name in ("a_scale", "b_scale"):
            if arguments[name].dtype is torch.float8_e8m0fnu:
                changed = arguments | {name: arguments[name].view(torch.uint8)}
                assert torch.equal(self.run(changed)[live], want[live])

    def test_no_rows_give_an_empty_result(self) -> None:
        for masked in self.forms:
            made = self.run(self.inputs(sizes=(0, 0), spare=0, masked=masked))
            assert made.shape == ((2, 0, self.n) if masked else (0, self.n))

    def test_explain_reads_the_call(self) -> None:
        assert kernelhub.grouped_gemm.explain(**self.inputs(), backend=self.kernel).selected == self.kernel

    def test_the_same_call_gives_the_same_bits(self) -> None:
        arguments = self.inputs(sizes=(40, 3, 70), spare=0)
        live = self.live(arguments)
        assert torch.equal(self.run(arguments)[live], self.run(arguments)[live])

    @pytest.mark.parametrize("lengths", NONSENSE)
    def test_lengths_that_make_no_sense_write_nothing_outside(self, lengths: tuple[int, ...]) -> None:
        """Whatever they are, the library is given groups that lie within its operands: its model looks."""
        for masked in self.forms:
            arguments = self.inputs(sizes=(5, 0, 19, 1), masked=masked, spare=0)
            plan = kernelhub.grouped_gemm.prepare(**arguments, backend=self.kernel)
            name = "group_sizes" if masked else "offsets"
            changed = arguments | {name: torch.tensor(lengths, dtype=torch.int32)}
            operands = GroupedOperands(*(changed.get(field) for field in GroupedOperands._fields))
            shape = (*arguments["a"].shape[:-1], self.n)
            count = torch.Size(shape).numel()
            memory = torch.full((count + 4096,), 7.0, dtype=torch.bfloat16)
            plan.adapter.launch(operands, memory[2048:][:count].view(shape))
            assert (memory[:2048] == 7).all()
            assert (memory[2048 + count :] == 7).all()
