"""What every kernel of `fp4_gemm` must do. Subclass `Fp4GemmContract` and name the kernel."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp4.problem import A_FORMATS, B_FORMATS
from kernelhub.ops.gemm.fp4.tolerance import error_allowed
from tests.conftest import DEVICE


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, by what is unusual about it."""

    label: str
    inputs: dict[str, Any]

    def __str__(self) -> str:
        return self.label


CASES = [
    *(
        Case(f"{a} x {b}, {tokens}", {"a_format": a, "b_format": b, "tokens": tokens, "bias": tokens == 40})
        for a, b in itertools.product(A_FORMATS, B_FORMATS)
        for tokens in (3, 40)
    ),
    *(Case(f"{tokens} tokens", {"tokens": tokens}) for tokens in (1, 15, 16, 17, 32, 33, 64, 65, 130)),
    *(Case(f"N = {n}", {"n": n, "tokens": tokens}) for n in (1, 63, 65, 129) for tokens in (2, 34)),
    *(Case(f"K = {k}", {"k": k, "tokens": tokens}) for k in (16, 48, 128, 144, 272) for tokens in (2, 34)),
    *(Case(f"mxfp4, K = {k}", {"k": k, "b_format": "mxfp4", "a_format": "mxfp4"}) for k in (32, 96, 160)),
    *(Case(str(dtype)[6:], {"out_dtype": dtype, "bias": True}) for dtype in (torch.float16, torch.float32)),
    Case("one scale for fp8", {"a_format": "fp8", "per_row": False, "tokens": 35}),
    Case("K that is split", {"k": 1040, "n": 40, "tokens": 17, "bias": True, "out_dtype": torch.float32}),
    Case("K that is split, nvfp4 x nvfp4", {"k": 2064, "n": 40, "tokens": 5, "a_format": "nvfp4"}),
    Case("K that is split, fp8", {"k": 1024, "n": 40, "tokens": 5, "a_format": "fp8", "bias": True}),
]


def sizes(arguments: dict[str, Any]) -> Tensor:
    """The sums of the magnitudes of all products, float64."""
    plain = {name: value for name, value in arguments.items() if name != "bias"}
    for name in ("a", "b"):
        codes, form = plain[name], plain[name].dtype
        if form is torch.uint8:
            plain[name] = codes & 0x77
        elif form.itemsize == 1:
            plain[name] = (codes.view(torch.uint8) & 0x7F).view(form)
        else:
            plain[name] = codes.abs()
    return kernelhub.fp4_gemm.reference(**plain, dtype=torch.float64)


def weight(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments.get(name) for name in ("b", "b_scale", "b_global_scale")}


class Fp4GemmContract:
    kernel: ClassVar[str]
    device: ClassVar[str] = DEVICE

    @classmethod
    def accepted_cases(cls) -> list[Case]:
        return CASES

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return fp4_gemm_inputs(**{"tokens": 5, "n": 72, "k": 256, "device": self.device} | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> Tensor:
        return kernelhub.fp4_gemm(**arguments, **more, backend=self.kernel)

    def packed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The same call with its weight packed by this kernel."""
        made = kernelhub.fp4_gemm.prepare(**arguments, backend=self.kernel).pack(**weight(arguments))
        return {name: value for name, value in arguments.items() if not name.startswith("b_")} | {"b": made}

    def check(self, got: Tensor, arguments: dict[str, Any]) -> None:
        want = kernelhub.fp4_gemm.reference(**arguments, dtype=torch.float64)
        assert got.shape == want.shape
        assert got.dtype is arguments["out_dtype"]
        k = 2 * arguments["b"].shape[1]
        size = sizes(arguments)
        if arguments.get("bias") is not None:
            size = size + arguments["bias"].double().abs()
        error = (got.double() - want).abs()
        assert (error <= error_allowed(want, size, k, got.dtype)).all(), float(error.max())

    def test_matches_the_reference_in_float64(self, case: Case) -> None:
        arguments = self.inputs(**case.inputs)
        rows, columns = arguments["a"].shape[0], arguments["b"].shape[0]
        out = torch.full((rows, columns), torch.nan, dtype=arguments["out_dtype"], device=self.device)
        assert self.run(arguments, out=out) is out
        self.check(out, arguments)
        assert torch.equal(self.run(arguments), out)

    def test_a_packed_weight_gives_the_same_bits_and_comes_back(self, case: Case) -> None:
        arguments = self.inputs(**case.inputs)
        packed = self.packed(arguments)
        assert torch.equal(self.run(packed), self.run(arguments))
        for got, want in zip(packed["b"].unpack(), weight(arguments).values(), strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                assert (got.dtype, got.shape) == (want.dtype, want.shape)
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))

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
        arguments = self.inputs(a_format="nvfp4", bias=True, out_dtype=torch.float32)
        first = self.run(arguments)
        for name in ("a_scale", "b_scale", "a_global_scale", "b_global_scale", "bias"):
            other = arguments[name].float() * 2
            changed = self.run({**arguments, name: other.to(arguments[name].dtype)})
            assert not torch.equal(changed, first), name
        without = {name: value for name, value in arguments.items() if name != "bias"}
        torch.testing.assert_close(self.run(without) + arguments["bias"], first, rtol=0, atol=1e-3)

    def test_bytes_and_dtypes_of_one_format_are_the_same(self) -> None:
        arguments = self.inputs(a_format="mxfp4", b_format="mxfp4")
        want = self.run(arguments)
        as_bytes = {f"{name}_scale": arguments[f"{name}_scale"].view(torch.uint8) for name in "ab"}
        assert torch.equal(self.run({**arguments, **as_bytes}), want)
        as_fp4 = {name: arguments[name].view(torch.float4_e2m1fn_x2) for name in "ab"}
        assert torch.equal(self.run({**arguments, **as_fp4}), want)
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
            arguments = self.inputs(a_format=form, tokens=6)
            want = self.run(arguments)
            moved = dict(arguments)
            for name in ("a", "a_scale"):
                if arguments.get(name) is not None:
                    moved[name] = arguments[name].unflatten(0, (2, 3))
            assert torch.equal(self.run(moved), want.unflatten(0, (2, 3)))

    def test_no_tokens_give_an_empty_result(self) -> None:
        for form in A_FORMATS:
            assert self.run(self.inputs(tokens=0, a_format=form)).shape == (0, 72)

    def test_the_same_call_gives_the_same_bits(self) -> None:
        for tokens in (5, 70):
            arguments = self.inputs(tokens=tokens, k=1024)
            first = self.run(arguments)
            assert all(torch.equal(self.run(arguments), first) for _ in range(3))

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
