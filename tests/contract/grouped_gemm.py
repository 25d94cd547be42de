"""What every kernel of `grouped_gemm` must do. Subclass `GroupedGemmContract` and name the kernel."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.evidence.cases import CASES
from kernelhub.ops.gemm.grouped.cases import FLOATS, QUANTISED
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs
from kernelhub.testing import OpContract
from tests.conftest import DEVICE


def doubled(scale: Tensor, at: slice) -> Tensor:
    """A scale of any format, twice as large in some places of its first dimension."""
    changed = scale.clone()
    if scale.dtype is torch.float8_e8m0fnu:
        changed.view(torch.uint8)[at] += 1
    elif scale.dtype is torch.float8_e4m3fn:
        changed.view(torch.uint8)[at] = (scale.float()[at] * 2).to(scale.dtype).view(torch.uint8)
    else:
        changed[at] *= 2
    return changed


class GroupedGemmContract(OpContract):
    op = "grouped_gemm"
    device = DEVICE
    formats: ClassVar[tuple[str, ...]] = (*FLOATS, *QUANTISED)
    takes_masked: ClassVar[bool] = True
    awkward_k: ClassVar[int] = 160
    narrow: ClassVar[dict[str, int]] = {}  # sizes for tests of many calls, where those of the inputs take long

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return grouped_gemm_inputs(**{"device": self.device, "format": self.formats[0]} | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> Tensor:
        return kernelhub.grouped_gemm(**arguments, **more, backend=self.kernel)

    def check(self, out: Tensor, arguments: dict[str, Any]) -> None:
        """Rows of groups are the reference's; those of none are not looked at."""
        judgement = CASES[self.op].judge({"out": out}, arguments)
        assert out.shape == judgement.want["out"].shape
        assert judgement.ok, judgement.figures

    def test_every_scale_counts_where_it_belongs(self) -> None:
        for name in self.formats:
            arguments = self.inputs(format=name, bias=name in ("nvfp4", "mxfp4"), **self.narrow)
            base = self.run(arguments)
            live = torch.arange(base.shape[0]) < 25
            for parameter in ("a_scale", "b_scale", "a_global_scale", "b_global_scale", "bias"):
                scale = arguments.get(parameter)
                if scale is None:
                    continue
                if scale.numel() == 1:
                    at, touched = slice(None), live
                elif parameter == "a_scale":
                    at = slice(6, 8)
                    touched = (torch.arange(base.shape[0]) >= 6) & (torch.arange(base.shape[0]) < 8)
                else:
                    at = slice(2, 3)  # the group of rows 5 to 23
                    touched = (torch.arange(base.shape[0]) >= 5) & (torch.arange(base.shape[0]) < 24)
                got = self.run(arguments | {parameter: doubled(scale, at)})
                assert torch.equal((got != base).any(1).cpu()[live], touched[live]), f"{name}: {parameter}"

    def test_operands_may_have_any_strides(self) -> None:
        for name in self.formats:
            arguments = self.inputs(format=name, n=64, k=self.awkward_k)
            want = self.run(arguments)
            moved = {key: value.clone() for key, value in arguments.items()}
            for key in ("a", "b", "a_scale", "b_scale"):
                value = arguments.get(key)
                if value is not None and value.ndim > 1:  # the last two dimensions in the other order
                    raw = value.view(torch.uint8) if value.element_size() == 1 else value
                    moved[key] = raw.transpose(-1, -2).contiguous().transpose(-1, -2).view(value.dtype)
            wide = torch.full((want.shape[0], 2 * want.shape[1]), torch.nan, device=self.device, dtype=want.dtype)
            got = self.run(moved, out=wide[:, ::2])
            self.check(got, arguments)
            assert wide[:, 1::2].isnan().all()
            assert self.run(moved).is_contiguous()

    def test_values_of_other_groups_do_not_reach_a_row(self) -> None:
        arguments = self.inputs(sizes=(3, 20, 2))
        want = self.run(arguments)
        arguments["b"][1] = torch.nan
        got = self.run(arguments)
        live = torch.arange(want.shape[0], device=self.device) < 25
        clean = live.clone()
        clean[3:23] = False
        assert torch.equal(got[clean], want[clean])
        assert got[live & ~clean].isnan().all()

    def test_the_same_call_gives_the_same_bits(self) -> None:
        arguments = self.inputs(sizes=(40, 3, 70), spare=0)
        assert torch.equal(self.run(arguments), self.run(arguments))

    def test_no_rows_give_an_empty_result(self) -> None:
        assert self.run(self.inputs(sizes=(0, 0), spare=0)).shape == (0, 192)
        if self.takes_masked:
            assert self.run(self.inputs(sizes=(0, 0), spare=0, masked=True)).shape == (2, 0, 192)

    def test_other_ways_to_hold_the_same_bits(self) -> None:
        if "mxfp4" in self.formats:
            arguments = self.inputs(format="mxfp4")
            want = self.run(arguments)
            for change in (
                {"b": arguments["b"].view(torch.float4_e2m1fn_x2)},
                {"b_scale": arguments["b_scale"].view(torch.uint8)},
            ):
                self.check(self.run(arguments | change), arguments)
                assert torch.equal(self.run(arguments | change)[:25], want[:25])
        if "channel" in self.formats:
            arguments = self.inputs(format="channel")
            want = self.run(arguments)
            scales = {name: arguments[name].unsqueeze(-1) for name in ("a_scale", "b_scale")}
            assert torch.equal(self.run(arguments | scales)[:25], want[:25])
        if "tensor" in self.formats:
            arguments = self.inputs(format="tensor")
            want = self.run(arguments)
            groups = arguments["b"].shape[0]
            for name, shape in (("a_scale", (1, 1)), ("b_scale", (groups, 1)), ("b_scale", (groups, 1, 1))):
                change = {name: arguments[name].reshape(shape)}
                self.check(self.run(arguments | change), arguments | change)
                assert torch.equal(self.run(arguments | change)[:25], want[:25])
            arguments["b_scale"] = arguments["b_scale"][:1]
            self.check(self.run(arguments), arguments)
            scales = {name: arguments[name].reshape(()) for name in ("a_scale", "b_scale")}
            assert torch.equal(self.run(arguments | scales)[:25], self.run(arguments)[:25])

    def test_explain_reads_the_call(self) -> None:
        arguments = self.inputs(n=64, k=128)
        selection = kernelhub.grouped_gemm.explain(**arguments, backend=self.kernel)
        assert selection.selected == self.kernel
        problem = selection.problem
        assert (problem.num_groups, problem.n, problem.k, problem.masked) == (4, 64, 128, False)

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        plan = kernelhub.grouped_gemm.prepare(**arguments, backend=self.kernel)
        assert plan.kernel == self.kernel
        assert torch.equal(plan.run(**arguments)[:25], self.run(arguments)[:25])
        with pytest.raises(InvalidArgument, match="the plan is for"):
            plan.run(**self.inputs(format="float16"))
        with pytest.raises(InvalidArgument, match="the plan is for"):
            plan.run(**self.inputs(n=64))
        with pytest.raises(InvalidArgument, match="other form"):
            plan.run(**self.inputs(masked=True))
        with pytest.raises(InvalidArgument, match="prepared with other arguments"):
            plan.run(**self.inputs(bias=True))

    def test_a_plan_for_scales_per_row_takes_one_row(self) -> None:
        if "channel" in self.formats:
            several, one = self.inputs(format="channel"), self.inputs(format="channel", sizes=(0, 1, 0, 0), spare=0)
            plan = kernelhub.grouped_gemm.prepare(**several, backend=self.kernel)
            self.check(plan.run(**one), one)
