"""FlashInfer's products of float4 keep the contract of `fp4_gemm`, with ones of torch that find scales by address."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.backends.flashinfer import kernels as records
from kernelhub.backends.flashinfer.gemm.operands import shuffled, unshuffled
from kernelhub.backends.shared.scales import tiled, untiled
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp4.problem import Fp4GemmProblem
from kernelhub.probes.device import simulated
from kernelhub.testing import KernelCase, OpContract
from tests.backends.flashinfer_products_fake import row_indices
from tests.backends.test_flashinfer import OnFake
from tests.contract.fp4_gemm import Fp4GemmContract, weight

NVFP4 = {"a_format": "nvfp4", "b_format": "nvfp4"}
MXFP4 = {"a_format": "mxfp4", "b_format": "mxfp4"}


class Products(OnFake, OpContract):
    op = "fp4_gemm"
    contract: ClassVar[Fp4GemmContract]
    layout: ClassVar[str] = "fp4.scales128x4.v1"
    formats: ClassVar[dict[str, str]] = NVFP4

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        cls.kernel = cls.contract.kernel
        return [case for case in super().accepted_cases() if f"a_format={cls.formats['a_format']}" in case.problem]

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return fp4_gemm_inputs(**{"tokens": 5, "n": 128, "k": 256} | self.formats | changes)

    def test_a_packed_weight_gives_the_same_bits_and_comes_back(self) -> None:
        for tokens, n, k in ((1, 128, 256), (129, 384, 1024), (33, 256, 512)):
            arguments = self.inputs(tokens=tokens, n=n, k=k)
            packed = self.contract.packed(arguments)
            assert packed["b"].layout == self.layout
            assert torch.equal(self.contract.run(packed), self.contract.run(arguments))
            for got, want in zip(packed["b"].unpack(), weight(arguments).values(), strict=True):
                assert (got is None) == (want is None)
                assert want is None or torch.equal(got.view(torch.uint8), want.view(torch.uint8))

    def test_each_scale_is_that_of_its_own_group(self) -> None:
        arguments = self.inputs(tokens=130)
        step = 16 if self.formats is NVFP4 else 1
        for name, at in (("a_scale", (129, 7)), ("a_scale", (33, 5)), ("b_scale", (97, 6)), ("b_scale", (3, 1))):
            changed = arguments[name].view(torch.uint8).clone()
            changed[at] += step
            other = arguments | {name: changed.view(arguments[name].dtype)}
            got = self.contract.run(other)
            self.contract.check(got, other)
            assert not torch.equal(got, self.contract.run(arguments))

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs()
        moved = dict(arguments)
        for name in ("a", "b", "a_scale", "b_scale"):
            raw = arguments[name].view(torch.uint8)
            moved[name] = torch.stack([raw, raw], 2).flatten(1)[:, ::2].view(arguments[name].dtype)
        wide = torch.full((5, 256), torch.nan, dtype=torch.bfloat16)
        self.contract.run(moved, out=wide[:, ::2])
        assert torch.equal(wide[:, ::2], self.contract.run(arguments))
        assert wide[:, 1::2].isnan().all()


class GlobalScales:
    def test_both_global_scales_multiply(self) -> None:
        arguments = self.inputs()  # type: ignore[attr-defined]
        contract = self.contract  # type: ignore[attr-defined]
        for name in ("a_global_scale", "b_global_scale"):
            other = arguments | {name: 2 * arguments[name]}
            assert torch.equal(contract.run(other), 2 * contract.run(arguments))


def contract_of(kernel: str) -> Fp4GemmContract:
    contract = Fp4GemmContract()
    contract.kernel = kernel
    return contract


class TestCutlass(Products, GlobalScales):
    contract = contract_of("flashinfer.fp4_cutlass")


class TestCudnn(Products, GlobalScales):
    contract = contract_of("flashinfer.fp4_cudnn")


class TestCudnnMxfp4(Products):
    contract = contract_of("flashinfer.fp4_cudnn")
    formats = MXFP4


class TestTrtllm(Products, GlobalScales):
    contract = contract_of("flashinfer.fp4_trtllm")
    layout = "fp4.shuffled32.scales128x4.v1"


class TestOneLayoutForTwo(OnFake):
    def test_what_one_packed_the_other_reads(self) -> None:
        arguments = fp4_gemm_inputs(tokens=5, n=128, k=256, **NVFP4)
        cutlass, cudnn = contract_of("flashinfer.fp4_cutlass"), contract_of("flashinfer.fp4_cudnn")
        assert torch.equal(cudnn.run(cutlass.packed(arguments)), cudnn.run(arguments))

    def test_what_was_shuffled_they_do_not(self) -> None:
        packed = contract_of("flashinfer.fp4_trtllm").packed(fp4_gemm_inputs(tokens=5, n=128, k=256, **NVFP4))
        for kernel in ("flashinfer.fp4_cutlass", "flashinfer.fp4_cudnn"):
            assert kernelhub.fp4_gemm.explain(**packed, backend=kernel).selected is None


@pytest.mark.parametrize("rows", [32, 128, 384])
def test_rows_are_shuffled_as_the_library_does(rows) -> None:
    numbers = torch.arange(rows)[:, None].repeat(1, 3)
    assert torch.equal(shuffled(numbers)[:, 0], row_indices(rows))
    assert torch.equal(unshuffled(shuffled(numbers)), numbers)


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (128, 4), (129, 5), (300, 7)])
def test_tiles_come_back(rows, groups) -> None:
    scale = torch.randint(0, 256, (rows, groups), dtype=torch.uint8)
    assert torch.equal(untiled(tiled(scale), rows, groups), scale)


@pytest.mark.parametrize(
    ("name", "device", "facets", "codes"),
    [
        ("cutlass", "B200", {}, set()),
        ("cutlass", "B300", {}, set()),
        ("cutlass", "H200", {}, {"capability"}),
        ("cutlass", "RTX5090", {}, {"capability"}),
        ("cutlass", "B200", {"a_format": "bfloat16"}, {"value"}),
        ("cutlass", "B200", {"b_format": "mxfp4"}, {"value"}),
        ("cutlass", "B200", MXFP4, {"value"}),
        ("cutlass", "B200", {"out_dtype": "float32"}, {"dtype"}),
        ("cutlass", "B200", {"n": 192}, {"divisibility"}),
        ("cutlass", "B200", {"k": 192}, {"divisibility"}),
        ("cudnn", "B200", MXFP4, set()),
        ("cudnn", "B200", {"b_format": "mxfp4"}, {"value"}),
        ("cudnn", "RTX5090", {}, {"capability"}),
        ("trtllm", "B200", {"k": 256, "n": 128}, set()),
        ("trtllm", "B200", {"k": 384}, {"divisibility"}),
        ("trtllm", "B200", {"out_dtype": "float16"}, {"dtype"}),
        ("trtllm", "B200", MXFP4, {"value"}),
    ],
)
def test_limits_are_reported(name, device, facets, codes) -> None:
    kernel = next(kernel for kernel in records.KERNELS if kernel.name == f"flashinfer.fp4_{name}")
    problem = Fp4GemmProblem(device=simulated(device), **{"a_format": "nvfp4", **facets})
    machine = SimulatedMachine({"flashinfer": "0.6.18.post1", "cudnn": "1.32.0"})
    found = (constraint.reject(problem, machine) for constraint in kernel.constraints)
    assert {rejection.code for rejection in found if rejection} == codes


def test_a_weight_in_another_layout_is_refused() -> None:
    machine = SimulatedMachine({"flashinfer": "0.6.18.post1", "cudnn": "1.32.0"})
    problem = {"a_format": "nvfp4", "weight_layout": "fp4.tiles64x128.v1"}
    for name in ("cutlass", "cudnn", "trtllm"):
        asked = {"machine": machine, "backend": f"flashinfer.fp4_{name}"}
        assert kernelhub.explain("fp4_gemm", device="B200", **asked, **problem).selected is None
