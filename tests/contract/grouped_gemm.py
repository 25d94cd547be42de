"""What every kernel of `grouped_gemm` must do. Subclass `GroupedGemmContract` and name the kernel."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import InvalidArgument
from kernelhub.ops.gemm.grouped.inputs import PAIRS, grouped_gemm_inputs
from kernelhub.ops.gemm.grouped.tolerance import error_allowed
from tests.conftest import DEVICE

FLOATS = ("bfloat16", "float16", "float32")
QUANTISED = ("tensor", "channel", "block", "nvfp4", "mxfp4", *PAIRS)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, by what is unusual about it."""

    label: str
    inputs: dict[str, Any]
    out_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        return self.label

    @property
    def facets(self) -> dict[str, Any]:
        """Those of the problem that decide who takes the case, but for its sizes."""
        name = self.inputs.get("format", "bfloat16")
        facets = {key: True for key in ("masked", "bias") if self.inputs.get(key)}
        facets |= {key: self.inputs[key] for key in "nk" if key in self.inputs}
        if self.out_dtype:
            facets["out_dtype"] = str(self.out_dtype)[6:]
        if name in PAIRS:
            rows, weights = name.split(" x ")
            return facets | {"a_scale": rows, "b_scale": weights}
        return facets | ({"a_dtype": name, "b_dtype": name} if name in FLOATS else {"b_scale": name})


def _case(label: str, out_dtype: torch.dtype | None = None, **inputs: Any) -> Case:
    return Case(label, inputs, out_dtype)


CASES = [
    *(_case(f"{name}{', masked' if masked else ''}", format=name, masked=masked)
      for name in (*FLOATS, *QUANTISED) for masked in (False, True)),
    *(_case(f"{name} with float16 rows", format=name, a_dtype=torch.float16) for name in ("nvfp4", "mxfp4")),
    *(_case(f"UE8M0 scales{', masked' if masked else ''}", format="block", powers_of_two=True, masked=masked)
      for masked in (False, True)),
    *(_case(f"{name} with a bias", format=name, bias=True)
      for name in ("bfloat16", "float32", "block", "mxfp4", *PAIRS)),
    _case("a bias, masked", masked=True, bias=True),
    *(_case(f"{name} to {str(dtype)[6:]}", dtype, format=name)
      for name, dtype in (("bfloat16", torch.float32), ("float32", torch.bfloat16), ("block", torch.float16),
                          ("channel", torch.float32), ("nvfp4", torch.float32), ("nvfp4 x nvfp4", torch.float16),
                          ("mxfp8 x mxfp8", torch.float32))),
    *(_case(f"groups of {sizes}", sizes=sizes)
      for sizes in ((1,), (15,), (16,), (17,), (33, 31), (0, 0, 5), (4, 0, 0), (0, 7, 0, 0, 9, 0), (63, 64, 65),
                    (127, 128, 129), (300, 1, 120))),
    *(_case(f"masked groups of {sizes}", sizes=sizes, masked=True)
      for sizes in ((1,), (16, 0, 3), (64, 1), (65, 130, 0))),
    _case("no row of any group", sizes=(0, 0, 0)),
    _case("no row of any group, masked", sizes=(0, 0, 0), masked=True),
    _case("no row to spare", spare=0),
    _case("37 groups, most empty", sizes=tuple(i * 7 % 5 if i % 3 == 0 else 0 for i in range(37)), n=64, k=64),
    *(_case(f"{n} columns", n=n, k=64) for n in (8, 64, 120, 128, 136)),
    *(_case(f"{n} columns, odd", n=n, k=64) for n in (1, 7, 127, 129)),
    *(_case(f"K of {k}", n=64, k=k) for k in (8, 56, 64, 72, 136)),
    *(_case(f"K of {k}, odd", n=64, k=k) for k in (1, 63, 65)),
    *(_case(f"blocks of {n} x {k}", format="block", n=n, k=k)
      for n, k in ((1, 128), (127, 96), (129, 130), (300, 260))),
    *(_case(f"{name}, {n} x {k}", format=name, n=n, k=k)
      for name in ("nvfp4", "mxfp4", *PAIRS) for n, k in ((1, 2), (65, 62), (129, 130), (64, 288))),
    *(_case(f"many rows of {name}", format=name, sizes=(150, 0, 250), n=130)
      for name in ("block", "mxfp4", "float32", *PAIRS)),
    *(_case(f"some rows of {name}", format=name, sizes=(50, 0, 70), n=130)
      for name in ("channel", "nvfp4", "float16", *PAIRS)),
    *(_case(f"{name}, K of {k}", format=name, n=64, k=k) for name in ("mxfp8 x mxfp8",) for k in (1, 33, 129)),
]  # fmt: skip


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


class GroupedGemmContract:
    kernel: ClassVar[str]
    device: ClassVar[str] = DEVICE
    fewest_cases: ClassVar[int] = 80
    formats: ClassVar[tuple[str, ...]] = (*FLOATS, *QUANTISED)
    takes_masked: ClassVar[bool] = True
    awkward_k: ClassVar[int] = 160
    narrow: ClassVar[dict[str, int]] = {}  # sizes for tests of many calls, where those of the inputs take long

    @classmethod
    def accepted_cases(cls) -> list[Case]:
        if cls.kernel.startswith("liar"):
            return CASES
        machine = SimulatedMachine({"triton": "3.7.1"}, {"TRITON_INTERPRET": "1"})
        op = kernelhub.grouped_gemm
        able = {"device": "H200", "machine": machine, "backend": cls.kernel}
        return [case for case in CASES if kernelhub.explain(op, **able, **case.facets).selected]

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return grouped_gemm_inputs(**{"device": self.device, "format": self.formats[0]} | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> Tensor:
        return kernelhub.grouped_gemm(**arguments, **more, backend=self.kernel)

    def check(self, out: Tensor, arguments: dict[str, Any]) -> None:
        """Rows of groups are the reference's; those of none are not looked at."""
        want = kernelhub.grouped_gemm.reference(**arguments, dtype=torch.float64)
        assert out.shape == want.shape
        allowed = error_allowed(arguments, want, out.dtype, tensor_cores=self.device != "cpu")
        there = ~want.isnan()
        assert bool(((out.double() - want).abs() <= allowed)[there].all())

    def test_there_are_cases(self) -> None:
        assert len(self.accepted_cases()) >= self.fewest_cases

    def test_matches_the_reference_in_float64(self, case: Case) -> None:
        arguments = self.inputs(**case.inputs)
        more = {} if case.out_dtype is None else {"out_dtype": case.out_dtype}
        made = self.run(arguments, **more)
        self.check(made, arguments)
        assert made.is_contiguous()
        assert made.dtype is (
            case.out_dtype or (torch.bfloat16 if arguments["a"].itemsize == 1 else arguments["a"].dtype)
        )
        out = torch.full_like(made, torch.nan)
        assert self.run(arguments, out=out) is out
        self.check(out, arguments)
        written = ~kernelhub.grouped_gemm.reference(**arguments).isnan()
        assert torch.equal(~out.isnan(), written), "a row of no group was written, or one of a group was not"

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
