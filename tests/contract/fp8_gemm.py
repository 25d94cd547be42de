"""What every kernel of `fp8_gemm` must do. Subclass `Fp8GemmContract` and name the kernel."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare
from kernelhub.testing import KernelCase, OpContract
from tests.conftest import DEVICE

FP32 = torch.float32


def is_weight_only(case: KernelCase) -> bool:
    """Whether activations of the call are not quantised."""
    return any(word.startswith("weight_only") for word in case.problem)


class Fp8GemmContract(OpContract):
    """Of quantised activations; `tests.contract.weight_only` is of others."""

    op = "fp8_gemm"
    device = DEVICE
    takes_bias: ClassVar[bool] = True
    plain: ClassVar[dict[str, Any]] = {"scaling": "block", "n": 192, "k": 256}

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        return [case for case in super().accepted_cases() if not is_weight_only(case)]

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return fp8_gemm_inputs(**{"tokens": 20, **self.plain, "device": self.device} | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> Tensor:
        return kernelhub.fp8_gemm(**arguments, **more, backend=self.kernel)

    def agrees(self, out: Tensor, arguments: dict[str, Any]) -> None:
        on_gpu = self.device == "cuda"
        agreement = compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=on_gpu)
        assert agreement.ok, str(agreement)

    def test_every_code_is_decoded_exactly(self) -> None:
        codes = torch.arange(256, device=self.device).to(torch.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0
        b = codes.repeat(self.plain["n"], 1).view(E4M3)
        b.view(torch.uint8)[1::2] = codes.flip(0)
        a = torch.zeros(256, 256, device=self.device).fill_diagonal_(1.0).to(E4M3)
        arguments = self.inputs(tokens=256, k=256)
        scales = {name: arguments[name] for name in ("a_scale", "b_scale")}
        ones = {name: torch.full_like(scale.float(), 1.0).to(scale.dtype) for name, scale in scales.items()}
        dtype = self.inputs()["out_dtype"]
        for rows in (slice(0, 256), slice(0, 5), slice(100, 140)):
            picked = {"a_scale": ones["a_scale"][rows] if ones["a_scale"].ndim == 2 else ones["a_scale"]}
            out = self.run({"a": a[rows], "b": b, **ones, **picked, "out_dtype": dtype})
            assert torch.equal(out, b.to(dtype).t()[rows])
            swapped = {"a": b[:1].contiguous().expand(8, 256), "b": a.view(torch.uint8)[: self.plain["n"]].view(E4M3)}
            if rows.stop == 5:
                eight = {"a_scale": ones["a_scale"][:8] if ones["a_scale"].ndim == 2 else ones["a_scale"]}
                got = self.run({**swapped, **ones, **eight, "out_dtype": dtype})
                assert torch.equal(got[3], b[0].to(dtype)[: self.plain["n"]])

    def test_nan_reaches_its_row_or_column_and_no_other(self) -> None:
        for tokens in (3, 70):
            for name, at in (("a", (1, 37)), ("b", (65, 200))):
                arguments = self.inputs(tokens=tokens)
                arguments[name].view(torch.uint8)[at] = 0xFF if name == "a" else 0x7F
                out = self.run(arguments)
                wrong = out.isnan()
                assert (wrong[at[0]] if name == "a" else wrong[:, at[0]]).all()
                assert int(wrong.sum()) == (out.shape[1] if name == "a" else out.shape[0])

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs(bias=self.takes_bias)
        want = self.run(arguments)
        moved = dict(arguments)
        for name in ("a", "b", "a_scale", "b_scale"):
            tensor = arguments[name]
            if tensor.ndim == 2:
                moved[name] = tensor.view(torch.uint8 if tensor.itemsize == 1 else tensor.dtype).t().contiguous().t()
                moved[name] = moved[name].view(tensor.dtype)
        if self.takes_bias:
            wide = arguments["bias"].new_zeros(2 * len(arguments["bias"]))
            moved["bias"] = wide[::2].copy_(arguments["bias"])
        around = torch.full((22, 2 * want.shape[1]), 7.0, dtype=want.dtype, device=self.device)
        out = around[1:-1, ::2]
        self.run(moved, out=out)
        self.agrees(out, arguments)
        assert (around[:, 1::2] == 7.0).all()
        assert (around[0] == 7.0).all()
        assert (around[-1] == 7.0).all()
        padded = torch.zeros(20, 512, device=self.device).to(E4M3)
        padded[:, 16:272].view(torch.uint8).copy_(arguments["a"].view(torch.uint8))
        self.agrees(self.run({**arguments, "a": padded[:, 16:272]}), arguments)

    def test_what_lies_beside_the_result_stays(self) -> None:
        n = self.plain["n"] - 3  # the last columns are less than the 16 bytes that TMA stores
        arguments = self.inputs(tokens=70, n=n)
        if kernelhub.fp8_gemm.explain(**arguments, backend=self.kernel).selected != self.kernel:
            pytest.skip(f"{self.kernel} does not take n = {n}")
        around = torch.full((72, n + 19), 7.0, dtype=arguments["out_dtype"], device=self.device)
        out = around[1:-1, 8 : n + 8]
        self.run(arguments, out=out)
        self.agrees(out, arguments)
        out.fill_(7.0)
        assert (around == 7.0).all()

    def test_explain_reads_the_call(self) -> None:
        arguments = self.inputs(bias=self.takes_bias)
        selection = kernelhub.fp8_gemm.explain(**arguments, backend=self.kernel)
        assert selection.selected == self.kernel
        problem = selection.problem
        told = (problem.scaling, problem.n, problem.k, problem.bias)
        assert told == (self.plain["scaling"], self.plain["n"], self.plain["k"], self.takes_bias)

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        dtype = arguments.pop("out_dtype")
        plan = kernelhub.fp8_gemm.prepare(**arguments, out_dtype=dtype, backend=self.kernel)
        assert plan.kernel == self.kernel
        assert plan.workspace_bytes(num_tokens=20) >= 0
        assert torch.equal(plan.run(**arguments), self.run({**arguments, "out_dtype": dtype}))
        other = self.inputs(tokens=33)
        other.pop("out_dtype")
        assert torch.equal(plan.run(**other), self.run({**other, "out_dtype": dtype}))
        with pytest.raises(InvalidArgument, match="the plan is for"):
            plan.run(**arguments, bias=torch.zeros(self.plain["n"], dtype=dtype, device=self.device))
        wider = self.inputs(n=256)
        wider.pop("out_dtype")
        with pytest.raises(InvalidArgument, match="the plan is for"):
            plan.run(**wider)

    def test_every_code_of_e5m2_is_decoded_exactly(self) -> None:
        facets = {"scaling": "tensor", "n": 64, "k": 256, "out_dtype": "float32", "e5m2": True}
        if not kernelhub.explain("fp8_gemm", device=torch.device(self.device), backend=self.kernel, **facets).selected:
            return
        codes = torch.arange(256, device=self.device).to(torch.uint8)
        codes[~codes.view(torch.float8_e5m2).float().isfinite()] = 0
        a = torch.zeros(256, 256, dtype=torch.uint8, device=self.device)
        a.diagonal().copy_(codes)
        one = torch.ones((), device=self.device)
        b = torch.ones(64, 256, device=self.device).to(E4M3)
        want = codes.view(torch.float8_e5m2).float()[:, None].expand(256, 64)
        for scale in (1.0, 2.0**115):  # the largest of them times its scale is beyond float32 while b's is not in
            scales = {"a_scale": one * scale, "b_scale": one / scale}
            for rows in (slice(0, 256), slice(100, 140)):
                given = {"a": a[rows].view(torch.float8_e5m2), "b": b, **scales, "out_dtype": FP32}
                assert torch.equal(self.run(given), want[rows])


class EveryScaling(Fp8GemmContract):
    """Of kernels that take scales of all kinds."""

    def test_scales_mean_the_same_in_every_form(self) -> None:
        arguments = self.inputs(scaling="row")
        want = self.run(arguments)
        a_scale, b_scale = arguments["a_scale"], arguments["b_scale"]
        for other in ({"a_scale": a_scale.view(-1)}, {"b_scale": b_scale.view(-1)}):
            assert torch.equal(self.run({**arguments, **other}), want)
        arguments = self.inputs(scaling="tensor")
        want = self.run(arguments)
        for name in ("a_scale", "b_scale"):
            assert torch.equal(self.run({**arguments, name: arguments[name].view(1)}), want)
        for scaling in ("block", "row_block", "mx"):
            arguments = self.inputs(scaling=scaling, e8m0=(True, True))
            assert arguments["a_scale"].dtype is E8M0
            want = self.run(arguments)
            raw = {name: arguments[name].view(torch.uint8) for name in ("a_scale", "b_scale")}
            assert torch.equal(self.run({**arguments, **raw}), want)

    def test_one_row_of_scales_may_be_that_of_128_tokens(self) -> None:
        """As FlashInfer's gemm_fp8_nt_blockscaled has it: ``[ceil(M/128), ceil(K/128)]``."""
        for tokens, e8m0 in ((5, (False, False)), (130, (True, True))):
            arguments = self.inputs(tokens=tokens, e8m0=e8m0)
            tall = arguments["a_scale"][::128].clone()
            wanted = tall.view(torch.uint8) if tall.itemsize == 1 else tall
            wanted = wanted.repeat_interleave(128, 0)[:tokens].view(tall.dtype)
            want = self.run({**arguments, "a_scale": wanted})
            assert torch.equal(self.run({**arguments, "a_scale": tall}), want)
            self.agrees(want, {**arguments, "a_scale": tall})
            made = {name: value for name, value in arguments.items() if name != "out_dtype"}
            plan = kernelhub.fp8_gemm.prepare(**made, backend=self.kernel)
            assert torch.equal(plan.run(**{**made, "a_scale": tall}), want)
