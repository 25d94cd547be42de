"""FlashInfer's products and experts on the device, by the contracts of the ops: only what is built ahead runs.

A class whose kernel cannot run here is skipped with the reason.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.tolerance import compare as compare_experts
from tests.contract.fp4_gemm import Fp4GemmContract
from tests.contract.fp8_gemm import Fp8GemmContract
from tests.contract.grouped_gemm import GroupedGemmContract
from tests.contract.quant import same
from tests.gpu.test_attention_on_gpu import captured

pytestmark = pytest.mark.gpu

BLOCKS: dict[str, Any] = {"scaling": "block", "n": 128, "k": 256}
WHOLE: dict[str, Any] = {"scaling": "tensor", "n": 192, "k": 256}


@pytest.fixture(autouse=True)
def nothing_is_downloaded(monkeypatch):
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    monkeypatch.setenv("FLASHINFER_NO_DOWNLOAD", "1")


def need(selection: Any, kernel: str) -> None:
    """Skip with the reason where the kernel cannot run, or not be loaded."""
    if selection.selected is None:
        own = next(item for item in selection.decisions if item.kernel == kernel)
        pytest.skip("; ".join(rejection.reason for rejection in own.rejections)[:300])


class Product(Fp8GemmContract):
    takes_bias = False
    real: ClassVar[tuple[int, int]]

    @pytest.fixture(autouse=True)
    def runs_here(self):
        need(kernelhub.fp8_gemm.explain(**self.inputs(), backend=self.kernel), self.kernel)

    def test_a_real_size(self) -> None:
        n, k = self.real
        arguments = self.inputs(tokens=7, n=n, k=k)
        self.agrees(self.run(arguments), arguments)

    def test_a_graph_gives_what_the_call_gives(self) -> None:
        plan = kernelhub.fp8_gemm.prepare(**self.inputs(), backend=self.kernel)
        if plan.graph.name != "FULL":
            pytest.skip(f"{self.kernel} stands in no graph")
        for tokens in (3, 70):
            arguments = self.inputs(tokens=tokens)
            out = torch.empty(tokens, self.plain["n"], dtype=torch.bfloat16, device="cuda")
            graph = captured(lambda arguments=arguments, out=out: self.run(arguments, out=out))
            fresh = self.inputs(tokens=tokens, seed=5)
            for name in ("a", "b", "a_scale", "b_scale"):
                arguments[name].copy_(fresh[name])
            graph.replay()
            self.agrees(out, fresh)


class TestBlocksHopper(Product):
    kernel = "flashinfer.fp8_blocks"
    plain: ClassVar[dict[str, Any]] = {**BLOCKS, "n": 192}
    real = (7168, 2304)


class TestGroupwiseCutlass(Product):
    kernel = "flashinfer.groupwise_cutlass"
    plain: ClassVar[dict[str, Any]] = BLOCKS
    real = (7168, 2304)


class TestGroupwiseTrtllm(Product):
    kernel = "flashinfer.groupwise_trtllm"
    plain: ClassVar[dict[str, Any]] = BLOCKS
    real = (7168, 2304)


class TestMx(Product):
    kernel = "flashinfer.mx_cutlass"
    plain: ClassVar[dict[str, Any]] = {"scaling": "mx", "n": 128, "k": 256}
    real = (4096, 4096)


class TestMxCudnn(TestMx):
    kernel = "flashinfer.mx_cudnn"


class TestCublas(Product):
    kernel = "flashinfer.fp8_cublas"
    plain: ClassVar[dict[str, Any]] = WHOLE
    real = (4096, 512)


class TestCudnn(TestCublas):
    kernel = "flashinfer.fp8_cudnn"


class TestCutlass(TestCublas):
    kernel = "flashinfer.fp8_cutlass"


@pytest.mark.parametrize("runner", ["cublas", "cudnn", "cutlass"])
@pytest.mark.parametrize("tokens", [1, 15, 16, 130])
def test_batches(tokens: int, runner: str) -> None:
    kernel = f"flashinfer.bmm_{runner}"
    for sizes in ({"n": 512, "k": 128}, {"n": 128, "k": 512}, {"n": 96, "k": 160, "out_dtype": torch.float16}):
        scaled = {"a_scaling": "tensor", "b_scaling": "tensor"}
        arguments = bmm_fp8_inputs(batch=5, tokens=tokens, device="cuda", **scaled, **sizes)
        need(kernelhub.bmm_fp8.explain(**arguments, backend=kernel), kernel)
        out = kernelhub.bmm_fp8(**arguments, backend=kernel)
        agreement = compare(out, kernelhub.bmm_fp8.reference, arguments, matrix_instructions=True)
        assert agreement.ok, str(agreement)


def test_the_longest_sums_that_are_admitted_are_exact_enough() -> None:
    """Hopper's instructions cut sums to 14 bits: K of 512 is what the record allows, by a derivation."""
    for tokens, seed in ((17, 0), (130, 1), (1000, 2)):
        arguments = fp8_gemm_inputs(tokens=tokens, n=2048, k=512, scaling="tensor", seed=seed, device="cuda")
        need(kernelhub.fp8_gemm.explain(**arguments, backend="flashinfer.fp8_cublas"), "flashinfer.fp8_cublas")
        out = kernelhub.fp8_gemm(**arguments, backend="flashinfer.fp8_cublas")
        agreement = compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=True)
        assert agreement.ok, str(agreement)


class TestSegments(GroupedGemmContract):
    """CUTLASS on sm_90: float16 and bfloat16, contiguous and masked."""

    kernel = "flashinfer.segments"
    formats = ("bfloat16", "float16")

    @pytest.fixture(autouse=True)
    def runs_here(self) -> None:
        need(kernelhub.grouped_gemm.explain(**self.inputs(), backend=self.kernel), self.kernel)

    @pytest.mark.parametrize("format", ["bfloat16", "float16"])
    @pytest.mark.parametrize("masked", [False, True])
    def test_a_graph_reads_the_lengths_of_each_replay(self, masked: bool, format: str) -> None:
        how = {"format": format, "masked": masked, "spare": 0, "n": 1536, "k": 2048}
        arguments = self.inputs(sizes=(40, 0, 7, 13), **how)
        shape = (*arguments["a"].shape[:-1], 1536)
        out = torch.zeros(shape, device="cuda", dtype=getattr(torch, format))
        graph = captured(lambda: self.run(arguments, out=out))
        name = "group_sizes" if masked else "offsets"
        for lengths in ((0, 0, 40, 40), (0, 0, 0, 0), (3, 40, 40, 40)) if masked else ((0, 0, 60, 60), (9, 9, 9, 50)):
            arguments[name].copy_(torch.tensor(lengths))
            out.fill_(torch.nan)
            graph.replay()
            self.check(out, arguments)
            assert torch.equal(~out.isnan(), ~kernelhub.grouped_gemm.reference(**arguments).isnan())

    @pytest.mark.parametrize("rows", [8, 300])
    def test_sizes_of_real_experts(self, rows: int) -> None:
        for masked in (False, True):
            sizes = tuple(rows * i % (2 * rows) for i in range(16))
            arguments = grouped_gemm_inputs(sizes=sizes, n=1536, k=2048, masked=masked, device="cuda")
            self.check(self.run(arguments), arguments)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("powers_of_two", [False, True])
def test_groups_in_blocks(powers_of_two: bool, masked: bool) -> None:
    kernel = "flashinfer.groupwise"
    contract = GroupedGemmContract()
    contract.device, contract.kernel = "cuda", kernel
    for sizes in ((1, 0, 5, 30), (0, 0, 0, 0), (300, 128, 127, 129)):
        how = {"format": "block", "powers_of_two": powers_of_two, "masked": masked, "device": "cuda"}
        arguments = grouped_gemm_inputs(sizes=sizes, n=256, k=512, **how)
        need(kernelhub.grouped_gemm.explain(**arguments, backend=kernel), kernel)
        contract.check(contract.run(arguments), arguments)


class TestDequantize:
    """`dequantize_nvfp4` to float16, bit for bit."""

    kernel = "flashinfer.dequantize"

    @pytest.fixture(autouse=True)
    def runs_here(self) -> None:
        given = (torch.zeros(1, 8, dtype=torch.uint8), torch.ones(1, 1).to(torch.float8_e4m3fn), torch.ones(1))
        on_gpu = [part.cuda() for part in given]
        how = {"out_dtype": torch.float16, "backend": self.kernel}
        need(kernelhub.dequantize_nvfp4.explain(*on_gpu, **how), self.kernel)

    @pytest.mark.parametrize("factor", [0.0, 1.0, 0.37, 2.0**-25, 2.0**-117, 1e-40, 3e38, torch.inf, torch.nan])
    def test_every_code_by_every_scale(self, factor: float) -> None:
        codes = torch.arange(128, dtype=torch.uint8).repeat(256, 1)
        codes[1::2] += 128
        scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16).view(torch.float8_e4m3fn)
        for swapped in (codes, codes.flip(0)):
            given = (swapped, scale, torch.tensor([factor]))
            out = kernelhub.dequantize_nvfp4(
                *(part.cuda() for part in given), out_dtype=torch.float16, backend=self.kernel
            )
            want = kernelhub.dequantize_nvfp4.reference(*given, out_dtype=torch.float16)
            assert same(out.cpu(), want)

    @pytest.mark.parametrize("shape", [(16,), (1, 2032), (4096, 7168), (3, (1 << 19) + 16), (70000, 32768)])
    def test_other_shapes(self, shape: tuple[int, ...]) -> None:
        """The last has more elements than an int counts."""
        half, groups = (*shape[:-1], shape[-1] // 2), (*shape[:-1], shape[-1] // 16)
        codes = torch.randint(0, 256, half, dtype=torch.uint8, device="cuda")
        scale = torch.randint(0, 127, groups, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        given = (codes, scale, torch.tensor([0.01], device="cuda"))
        out = kernelhub.dequantize_nvfp4(*given, out_dtype=torch.float16, backend=self.kernel)
        other = kernelhub.dequantize_nvfp4(*given, out_dtype=torch.float16, backend="triton.dequantize")
        assert torch.equal(out.view(-1), other.view(-1))


@pytest.mark.parametrize("tokens", [1, 33, 128, 300])
@pytest.mark.parametrize(
    ("runner", "format"), [("cutlass", "nvfp4"), ("trtllm", "nvfp4"), ("cudnn", "nvfp4"), ("cudnn", "mxfp4")]
)
def test_fp4(runner: str, format: str, tokens: int) -> None:
    kernel = f"flashinfer.fp4_{runner}"
    contract = Fp4GemmContract()
    contract.kernel = kernel
    for n, k in ((128, 256), (384, 1024), (4096, 4096)):
        formats = {"a_format": format, "b_format": format}
        arguments = fp4_gemm_inputs(tokens=tokens, n=n, k=k, device="cuda", **formats)
        need(kernelhub.fp4_gemm.explain(**arguments, backend=kernel), kernel)
        out = contract.run(arguments)
        contract.check(out, arguments)
        assert torch.equal(contract.run(contract.packed(arguments)), out)


@pytest.mark.parametrize("tokens", [1, 7, 64, 300, 3000])
@pytest.mark.parametrize("form", ["", "_fp8"])
def test_experts(form: str, tokens: int) -> None:
    """Few tokens and many, since they are sorted in other ways, with an expert that is chosen twice and ids outside."""
    kernel = f"flashinfer.cutlass_experts{form}"
    more = {} if not form else {name: torch.tensor(3.0 / 448, device="cuda") for name in ("a1_scale", "a2_scale")}
    weights = {"weights": "fp8_tensor"} if form else {}
    arguments = moe_inputs("qwen3-30b-a3b", tokens=tokens, tensor_parallel=4, device="cuda", **weights) | more
    need(kernelhub.fused_moe.explain(**arguments, backend=kernel), kernel)
    plan = kernelhub.fused_moe.prepare(**arguments, backend=kernel)
    ids = arguments["topk_ids"]
    for change in (lambda: None, lambda: ids[:, 1].copy_(ids[:, 0]), lambda: ids[::2, 2].fill_(-1)):
        change()
        out = plan.run(arguments["x"], arguments["topk_weights"], ids)
        agreement = compare_experts(out, arguments)
        assert agreement.ok, str(agreement)
        assert torch.equal(plan.run(arguments["x"], arguments["topk_weights"], ids), out)
