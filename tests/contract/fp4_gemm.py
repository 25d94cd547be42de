"""What every kernel of `fp4_gemm` must do. Subclass `Fp4GemmContract` and name the kernel."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.evidence.cases import CASES
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp4.problem import A_FORMATS
from kernelhub.testing import OpContract
from tests.conftest import DEVICE


def weight(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments.get(name) for name in ("b", "b_scale", "b_global_scale")}


class Fp4GemmContract(OpContract):
    op = "fp4_gemm"
    device = DEVICE
    a_formats: ClassVar[tuple[str, ...]] = A_FORMATS  # those that the kernel takes

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return fp4_gemm_inputs(**{"tokens": 5, "n": 72, "k": 256, "device": self.device} | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> Tensor:
        return kernelhub.fp4_gemm(**arguments, **more, backend=self.kernel)

    def packed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The same call with its weight packed by this kernel."""
        made = kernelhub.fp4_gemm.prepare(**arguments, backend=self.kernel).pack(**weight(arguments))
        return {name: value for name, value in arguments.items() if not name.startswith("b_")} | {"b": made}

    def check(self, got: Tensor, arguments: dict[str, Any]) -> None:
        """Compare a result with the reference, within the op's tolerance."""
        assert got.dtype is arguments["out_dtype"]
        judgement = CASES[self.op].judge({"out": got}, arguments)
        assert judgement.ok, judgement.figures

    def test_a_packed_weight_gives_the_same_bits(self) -> None:
        """The cases ask of it only that it is right and comes back."""
        found = 0
        for case in CASES[self.op].cases():
            arguments = case.make(torch.device(self.device)) if case.packs else {}
            if not arguments or (self.most_elements and arguments["b"].numel() > self.most_elements):
                continue
            selection = kernelhub.explain(self.op, **arguments, backend=self.kernel, packing=True)
            if selection.selected is not None:
                assert torch.equal(self.run(self.packed(arguments)), self.run(arguments)), case.label
                found += 1
        assert found

    def test_float32_results_need_no_rounding(self) -> None:
        """Whole numbers: every product and sum is exact, so every kernel must give them exactly."""
        random = torch.Generator().manual_seed(0)
        for b_format, group in (("nvfp4", 16), ("mxfp4", 32)):
            a = torch.randint(-8, 9, (37, 256), generator=random).bfloat16().to(self.device)
            b = torch.randint(0, 256, (70, 128), generator=random).to(torch.uint8).to(self.device)
            powers = torch.randint(1, 4, (70, 256 // group), generator=random)
            scale = torch.exp2(powers.float()).to(torch.float8_e4m3fn)
            if b_format == "mxfp4":
                scale = (powers + 127).to(torch.uint8)
            scale = scale.to(self.device)
            factor = {"b_global_scale": torch.full((1,), 2.0, device=self.device)} if b_format == "nvfp4" else {}
            arguments = {"a": a, "b": b, "b_scale": scale, **factor, "out_dtype": torch.float32}
            want = kernelhub.fp4_gemm.reference(**arguments, dtype=torch.float64)
            assert torch.equal(self.run(arguments).double(), want)
            assert torch.equal(self.run({**arguments, "a": a[:3]}).double(), want[:3])

    def test_every_operand_changes_the_result(self) -> None:
        a_format = "nvfp4" if "nvfp4" in self.a_formats else "bfloat16"
        arguments = self.inputs(a_format=a_format, bias=True, out_dtype=torch.float32)
        first = self.run(arguments)
        for name in ("a_scale", "b_scale", "a_global_scale", "b_global_scale", "bias"):
            if arguments.get(name) is None:
                continue
            other = arguments[name].float() * 2
            changed = self.run({**arguments, name: other.to(arguments[name].dtype)})
            assert not torch.equal(changed, first), name
        without = {name: value for name, value in arguments.items() if name != "bias"}
        torch.testing.assert_close(self.run(without) + arguments["bias"], first, rtol=0, atol=1e-3)

    def test_bytes_and_dtypes_of_one_format_are_the_same(self) -> None:
        both = "mxfp4" in self.a_formats
        arguments = self.inputs(a_format="mxfp4" if both else "bfloat16", b_format="mxfp4")
        want, names = self.run(arguments), "ab" if both else "b"
        as_bytes = {f"{name}_scale": arguments[f"{name}_scale"].view(torch.uint8) for name in names}
        assert torch.equal(self.run({**arguments, **as_bytes}), want)
        as_fp4 = {name: arguments[name].view(torch.float4_e2m1fn_x2) for name in names}
        assert torch.equal(self.run({**arguments, **as_fp4}), want)
        if "fp8" not in self.a_formats:
            return
        arguments = self.inputs(a_format="fp8")
        flat = {**arguments, "a_scale": arguments["a_scale"][:, 0]}
        assert torch.equal(self.run(flat), self.run(arguments))

    def test_scales_at_the_ends_of_their_range_are_right(self) -> None:
        arguments = self.inputs(a_format="bfloat16", b_format="mxfp4", out_dtype=torch.float32, n=64)
        arguments["b_scale"].view(torch.uint8)[:] = torch.tensor([1, 60, 100, 127, 150, 200, 220, 230]).to(torch.uint8)
        self.check(self.run(arguments), arguments)
        arguments["b_scale"].view(torch.uint8)[0, 3] = 255
        got = self.run(arguments)
        assert got[:, 0].isnan().all()
        assert got[:, 1:].isfinite().all()

    def test_operands_may_have_any_strides(self) -> None:
        for form, tokens in (("bfloat16", 5), ("nvfp4", 5), ("fp8", 40), ("mxfp8", 40)):
            if form not in self.a_formats:
                continue
            arguments = self.inputs(a_format=form, tokens=tokens)
            want = self.run(arguments)
            moved = dict(arguments)
            for name in ("a", "b", "a_scale", "b_scale"):
                tensor = arguments.get(name)
                if tensor is not None:
                    raw = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
                    apart = torch.stack([raw, torch.zeros_like(raw)], 2).flatten(1)
                    moved[name] = apart[:, ::2].view(tensor.dtype) if tensor.itemsize == 1 else apart[:, ::2]
            wide = torch.full((tokens, 144), torch.nan, dtype=torch.bfloat16, device=self.device)
            assert torch.equal(self.run(moved, out=wide[:, ::2]), want)
            assert wide[:, 1::2].isnan().all()

    def test_leading_dimensions_are_kept(self) -> None:
        for form in ("bfloat16", "fp8", "mxfp8", "nvfp4"):
            if form not in self.a_formats:
                continue
            arguments = self.inputs(a_format=form, tokens=6)
            want = self.run(arguments)
            moved = dict(arguments)
            for name in ("a", "a_scale"):
                if arguments.get(name) is not None:
                    moved[name] = arguments[name].unflatten(0, (2, 3))
            assert torch.equal(self.run(moved), want.unflatten(0, (2, 3)))

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs(bias=True)
        plan = kernelhub.fp4_gemm.prepare(**arguments, backend=self.kernel)
        assert plan.kernel == self.kernel
        operands = {name: value for name, value in arguments.items() if name != "out_dtype"}
        assert torch.equal(plan.run(**operands), self.run(arguments))
        other = {name: value for name, value in self.inputs(n=80, bias=True).items() if name != "out_dtype"}
        with pytest.raises(InvalidArgument, match=r"the plan is for nvfp4 \[72, 256 / 2\]"):
            plan.run(**other)
        with pytest.raises(InvalidArgument, match="bias is missing"):
            plan.run(**{**operands, "bias": None})
        with pytest.raises(InvalidArgument, match="the plan is for bfloat16"):
            plan.run(**{**operands, "a": operands["a"].half()})
        packed = self.packed(arguments)
        if packed["b"].layout != "checkpoint":
            with pytest.raises(InvalidArgument, match="prepare one with this weight"):
                plan.run(packed["a"], packed["b"], bias=packed["bias"])
        again = kernelhub.fp4_gemm.prepare(**packed, backend=self.kernel)
        assert torch.equal(again.run(packed["a"], packed["b"], bias=packed["bias"]), self.run(arguments))
