"""FlashInfer's float8 products keep the contracts of the ops, with kernels of torch that read memory as its own do."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.backends.flashinfer import kernels as records
from kernelhub.dispatch.constraint import TorchBuilt
from kernelhub.dispatch.machine import Machine, SimulatedMachine
from kernelhub.ops.gemm.fp8.problem import Fp8GemmProblem
from kernelhub.probes.device import simulated
from tests.backends.test_flashinfer import OnFake
from tests.contract import bmm_fp8 as batched
from tests.contract.fp8_gemm import Fp8GemmContract

BLOCKS = {"scaling": "block", "n": 128, "k": 256}
WHOLE = {"scaling": "tensor", "n": 192, "k": 256}


class Product(OnFake, Fp8GemmContract):
    takes_bias = False


class TestBlocksHopper(Product):
    kernel = "flashinfer.fp8_blocks"


class TestGroupwiseCutlass(Product):
    kernel = "flashinfer.groupwise_cutlass"
    plain: ClassVar[dict[str, Any]] = BLOCKS


class TestGroupwiseTrtllm(Product):
    kernel = "flashinfer.groupwise_trtllm"
    plain: ClassVar[dict[str, Any]] = BLOCKS


class TestMx(Product):
    kernel = "flashinfer.mx_cutlass"
    plain: ClassVar[dict[str, Any]] = BLOCKS | {"scaling": "mx"}


class TestMxCudnn(TestMx):
    kernel = "flashinfer.mx_cudnn"


class TestCublas(Product):
    kernel = "flashinfer.fp8_cublas"
    plain: ClassVar[dict[str, Any]] = WHOLE


class TestCudnn(TestCublas):
    kernel = "flashinfer.fp8_cudnn"


class TestCutlass(TestCublas):
    kernel = "flashinfer.fp8_cutlass"


class Batch(OnFake, batched.BmmFp8Contract):
    # What these ask for is scales for each matrix, which the records refuse.
    test_each_matrix_is_multiplied_by_its_own = None
    test_scales_mean_the_same_in_every_form = None
    test_explain_reads_the_call = None

    def test_scales_of_each_matrix_are_refused(self) -> None:
        for name in ("a_scaling", "b_scaling"):
            assert kernelhub.explain("bmm_fp8", device="cpu", backend=self.kernel, **{name: "batch"}).selected is None

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs()
        assert not arguments["a"].is_contiguous()
        around = torch.full((12, 5, 2 * 96), 7.0, dtype=torch.bfloat16)
        b = arguments["b"].view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).view(arguments["b"].dtype)
        self.run({**arguments, "b": b}, out=around.transpose(0, 1)[1:4, :, ::2])
        self.agrees(around.transpose(0, 1)[1:4, :, ::2], arguments)
        assert (around[..., 1::2] == 7.0).all()
        assert (around[:, (0, 4)] == 7.0).all()


class TestCublasBatch(Batch):
    kernel = "flashinfer.bmm_cublas"


class TestCudnnBatch(Batch):
    kernel = "flashinfer.bmm_cudnn"


class TestCutlassBatch(Batch):
    kernel = "flashinfer.bmm_cutlass"


def rejections(name: str, device: str, **facets: Any) -> set[str]:
    kernel = next(kernel for kernel in records.KERNELS if kernel.name == f"flashinfer.{name}")
    problem = Fp8GemmProblem(device=simulated(device), **facets)
    machine = SimulatedMachine({"flashinfer": "0.6.18.post1", "cudnn": "1.32.0"})
    found = (constraint.reject(problem, machine) for constraint in kernel.constraints)
    return {rejection.code for rejection in found if rejection}


MXFP8 = {"scaling": "mx", "a_scale_dtype": "float8_e8m0fnu", "b_scale_dtype": "float8_e8m0fnu"}


class TestLimits:
    def test_long_sums_in_14_bits_are_refused_before_blackwell(self) -> None:
        for name in ("fp8_cublas", "fp8_cudnn"):
            assert rejections(name, "H200", scaling="tensor", k=512) == set()
            assert rejections(name, "H200", scaling="tensor", k=528) == {"accuracy"}
            assert rejections(name, "B200", scaling="tensor", k=8192) == set()

    @pytest.mark.parametrize(
        ("name", "device", "facets", "codes"),
        [
            ("fp8_blocks", "H200", {"n": 192, "k": 128}, set()),
            ("fp8_blocks", "B200", {}, {"capability"}),
            ("fp8_blocks", "H200", {"n": 96}, {"divisibility"}),
            ("fp8_blocks", "H200", {"k": 192}, {"divisibility"}),
            ("fp8_blocks", "H200", {"out_dtype": "float16"}, {"dtype"}),
            ("groupwise_cutlass", "B200", {}, set()),
            ("groupwise_cutlass", "H200", {}, {"capability"}),
            ("groupwise_cutlass", "RTX5090", {}, {"capability"}),
            ("groupwise_cutlass", "B200", {"n": 192}, {"divisibility"}),
            ("groupwise_trtllm", "B200", {"k": 256}, set()),
            ("groupwise_trtllm", "B200", {"k": 128}, {"range"}),
            ("groupwise_trtllm", "B200", {"out_dtype": "float16"}, {"dtype"}),
            ("mx_cutlass", "B200", MXFP8, set()),
            ("mx_cutlass", "H200", MXFP8, {"capability"}),
            ("mx_cutlass", "B200", {**MXFP8, "k": 192}, {"divisibility"}),
            ("mx_cudnn", "RTX5090", MXFP8, {"capability"}),
            ("mx_cudnn", "B200", {**MXFP8, "n": 192}, {"divisibility"}),
            ("fp8_cutlass", "H200", {"scaling": "tensor"}, {"capability"}),
            ("fp8_cutlass", "B200", {"scaling": "row"}, {"value"}),
            ("fp8_cudnn", "RTX5090", {"scaling": "tensor"}, {"capability"}),
            ("fp8_cublas", "L40S", {"scaling": "tensor", "k": 256, "n": 24}, {"divisibility"}),
        ],
    )
    def test_each_is_reported(self, name, device, facets, codes) -> None:
        assert rejections(name, device, **facets) == codes

    def test_mxfp8_of_cudnn_is_asked_of_newer_releases(self) -> None:
        for version, kernel in (("0.6.12", None), ("0.6.18.post1", "flashinfer.mx_cudnn")):
            machine = SimulatedMachine({"flashinfer": version, "cudnn": "1.32.0"})
            asked = {"device": "B200", "machine": machine, "backend": "flashinfer.mx_cudnn"}
            assert kernelhub.explain("fp8_gemm", **asked, **MXFP8).selected == kernel

    def test_cudnn_is_requested(self) -> None:
        machine = SimulatedMachine({"flashinfer": "0.6.18.post1"})
        selection = kernelhub.explain(
            "fp8_gemm", device="B200", machine=machine, backend="flashinfer.fp8_cudnn", scaling="tensor"
        )
        assert selection.selected is None
        assert "cudnn" in str(selection)

    def test_the_cuda_of_torch_is_looked_at(self, monkeypatch) -> None:
        here = dataclasses.replace(simulated("H200"), simulated=False)
        for built, code in (("12.6", "package_version"), ("12.8", None), ("13.0", None), (None, "package_version")):
            monkeypatch.setattr(torch.version, "cuda", built)
            rejection = TorchBuilt("12.8").reject(Fp8GemmProblem(device=here), Machine())
            assert (rejection.code if rejection else None) == code
