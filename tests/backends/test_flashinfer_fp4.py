"""FlashInfer's product of NVFP4 keeps the contract of `fp4_gemm`, with one of torch that finds scales by address."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.flashinfer import kernels as records
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp4.problem import Fp4GemmProblem
from kernelhub.probes.device import simulated
from tests.backends.test_flashinfer import OnFake
from tests.contract.fp4_gemm import Case, Fp4GemmContract, weight

NAME = "flashinfer.fp4_cutlass"
CASES = [
    *(Case(f"{tokens} tokens", {"tokens": tokens}) for tokens in (1, 31, 32, 33, 127, 128, 129, 260)),
    *(Case(f"{n} by {k}", {"n": n, "k": k}) for n, k in ((128, 128), (256, 384), (384, 1024))),
    Case("float16", {"out_dtype": torch.float16}),
]


def inputs(**changes: Any) -> dict[str, Any]:
    return fp4_gemm_inputs(**{"tokens": 5, "n": 128, "k": 256, "a_format": "nvfp4", "b_format": "nvfp4"} | changes)


class TestFp4(OnFake):
    contract = Fp4GemmContract()
    contract.kernel = NAME

    @pytest.mark.parametrize("form", CASES, ids=str)
    def test_matches_the_reference_in_float64(self, form) -> None:
        arguments = inputs(**form.inputs)
        rows, columns = arguments["a"].shape[0], arguments["b"].shape[0]
        out = torch.full((rows, columns), torch.nan, dtype=arguments["out_dtype"])
        assert self.contract.run(arguments, out=out) is out
        self.contract.check(out, arguments)

    @pytest.mark.parametrize("form", CASES, ids=str)
    def test_a_packed_weight_gives_the_same_bits_and_comes_back(self, form) -> None:
        arguments = inputs(**form.inputs)
        packed = self.contract.packed(arguments)
        assert packed["b"].layout == "fp4.scales128x4.v1"
        assert torch.equal(self.contract.run(packed), self.contract.run(arguments))
        for got, want in zip(packed["b"].unpack(), weight(arguments).values(), strict=True):
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))

    def test_each_scale_is_that_of_its_own_group(self) -> None:
        arguments = inputs(tokens=130)
        for name, at in (("a_scale", (129, 7)), ("a_scale", (33, 5)), ("b_scale", (97, 13))):
            changed = arguments[name].view(torch.uint8).clone()
            changed[at] += 16
            other = arguments | {name: changed.view(torch.float8_e4m3fn)}
            got = self.contract.run(other)
            self.contract.check(got, other)
            assert not torch.equal(got, self.contract.run(arguments))

    def test_both_global_scales_multiply(self) -> None:
        arguments = inputs()
        for name in ("a_global_scale", "b_global_scale"):
            other = arguments | {name: 2 * arguments[name]}
            assert torch.equal(self.contract.run(other), 2 * self.contract.run(arguments))

    def test_operands_may_have_any_strides(self) -> None:
        arguments = inputs()
        moved = dict(arguments)
        for name in ("a", "b", "a_scale", "b_scale"):
            raw = arguments[name].view(torch.uint8)
            moved[name] = torch.stack([raw, raw], 2).flatten(1)[:, ::2].view(arguments[name].dtype)
        wide = torch.full((5, 256), torch.nan, dtype=torch.bfloat16)
        self.contract.run(moved, out=wide[:, ::2])
        assert torch.equal(wide[:, ::2], self.contract.run(arguments))
        assert wide[:, 1::2].isnan().all()


@pytest.mark.parametrize(
    ("device", "facets", "codes"),
    [
        ("B200", {}, set()),
        ("B300", {}, set()),
        ("H200", {}, {"capability"}),
        ("RTX5090", {}, {"capability"}),
        ("B200", {"a_format": "bfloat16"}, {"value"}),
        ("B200", {"b_format": "mxfp4"}, {"value"}),
        ("B200", {"out_dtype": "float32"}, {"dtype"}),
        ("B200", {"n": 192}, {"divisibility"}),
        ("B200", {"k": 192}, {"divisibility"}),
    ],
)
def test_limits_are_told(device, facets, codes) -> None:
    kernel = next(kernel for kernel in records.KERNELS if kernel.name == NAME)
    problem = Fp4GemmProblem(device=simulated(device), **{"a_format": "nvfp4", **facets})
    machine = SimulatedMachine({"flashinfer": "0.6.18.post1"})
    found = (constraint.reject(problem, machine) for constraint in kernel.constraints)
    assert {rejection.code for rejection in found if rejection} == codes


def test_a_weight_in_another_layout_is_refused() -> None:
    machine = SimulatedMachine({"flashinfer": "0.6.18.post1"})
    problem = {"a_format": "nvfp4", "weight_layout": "fp4.tiles64x128.v1"}
    assert kernelhub.explain("fp4_gemm", device="B200", machine=machine, backend=NAME, **problem).selected is None
