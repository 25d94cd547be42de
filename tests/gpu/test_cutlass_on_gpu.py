"""vLLM's and SGLang's CUTLASS kernels on a GPU: contracts, real sizes, graphs, syncs. Skipped where they cannot run."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.errors import NoKernel
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from tests.contract import fp4_gemm, fp8_gemm
from tests.gpu.test_attention_on_gpu import captured

pytestmark = pytest.mark.gpu

FP16 = torch.float16
FAST = torch.cuda.is_available() and torch.cuda.get_device_capability() in ((8, 9), (9, 0))


def need(function: Any, kernel: str, arguments: dict[str, Any]) -> None:
    """Skip with the reason where the kernel cannot run, or its library not be loaded."""
    selection = function.explain(**arguments, backend=kernel)
    if selection.selected == kernel:
        try:
            function.prepare(**arguments, backend=kernel)
        except NoKernel:
            selection = function.explain(**arguments, backend=kernel)
    if selection.selected != kernel:
        own = next(item for item in selection.decisions if item.kernel == kernel)
        pytest.skip(f"{kernel}: {'; '.join(rejection.reason for rejection in own.rejections)}")


def without_syncs(call: Any) -> torch.Tensor:
    """A call that waits for the GPU raises; the first may."""
    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class OfFp8(fp8_gemm.Fp8GemmContract):
    graphs: ClassVar[bool] = True
    large: ClassVar[tuple[tuple[int, int], ...]]

    @pytest.fixture(autouse=True)
    def able(self) -> None:
        need(kernelhub.fp8_gemm, self.kernel, self.inputs())

    def test_real_sizes(self) -> None:
        for n, k in self.large:
            for tokens in (1, 16, 64, 129, 2048):
                self.agrees(self.run(arguments := self.inputs(tokens=tokens, n=n, k=k)), arguments)

    def test_no_call_waits_for_the_gpu(self) -> None:
        arguments = self.inputs(tokens=7)
        self.agrees(without_syncs(lambda: self.run(arguments)), arguments)

    def test_a_captured_call_reads_the_operands_of_each_replay(self) -> None:
        if not self.graphs:
            pytest.skip(f"{self.kernel} claims no graph")
        for tokens in (1, 7, 64, 200):
            arguments = self.inputs(tokens=tokens)
            out = torch.empty(tokens, self.plain["n"], dtype=arguments["out_dtype"], device="cuda")
            graph = captured(lambda a=arguments, o=out: self.run(a, out=o))
            new = self.inputs(tokens=tokens, seed=1)
            for name in ("a", "b", "a_scale", "b_scale"):
                arguments[name].copy_(new[name])
            out.fill_(torch.nan)
            graph.replay()
            self.agrees(out, new)


class TestVllmScaledMm(OfFp8):
    kernel = "cutlass.vllm_scaled_mm"
    plain = {"scaling": "row", "n": 192, "k": 256}  # noqa: RUF012
    large = ((5120, 2048), (1280, 1024)) if FAST else ((5120, 2048), (8192, 8192))


class TestSglScaledMm(TestVllmScaledMm):
    kernel = "cutlass.sgl_fp8_scaled_mm"
    graphs = False


class TestVllmBlockwise(OfFp8):
    kernel = "cutlass.vllm_blockwise"
    takes_bias = False
    plain = {"scaling": "block", "n": 256, "k": 256}  # noqa: RUF012
    large = ((24576, 1536), (7168, 2304))

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        dtype = arguments.pop("out_dtype")
        plan = kernelhub.fp8_gemm.prepare(**arguments, out_dtype=dtype, backend=self.kernel)
        assert torch.equal(plan.run(**arguments), self.run({**arguments, "out_dtype": dtype}))


class TestSglBlockwise(TestVllmBlockwise):
    kernel = "cutlass.sgl_fp8_blockwise"
    graphs = False


class TestVllmFp4:
    """Parts of the contract of `fp4_gemm`; the rest is about formats that the kernel does not take."""

    kernel = "cutlass.vllm_fp4"
    contract = fp4_gemm.Fp4GemmContract()

    @pytest.fixture(autouse=True)
    def able(self) -> None:
        need(kernelhub.fp4_gemm, self.kernel, self.inputs())

    def inputs(self, **changes: Any) -> dict[str, Any]:
        shape = {"tokens": 5, "n": 96, "k": 256, "a_format": "nvfp4", "device": "cuda"}
        return fp4_gemm_inputs(**shape | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> torch.Tensor:
        return kernelhub.fp4_gemm(**arguments, **more, backend=self.kernel)

    @pytest.mark.parametrize(("n", "k"), [(32, 64), (96, 192), (288, 832), (5120, 2048)])
    @pytest.mark.parametrize("tokens", [1, 16, 17, 129, 300])
    def test_matches_the_reference_in_float64(self, tokens: int, n: int, k: int) -> None:
        for dtype in (torch.bfloat16, FP16):
            arguments = self.inputs(tokens=tokens, n=n, k=k, out_dtype=dtype)
            out = torch.full((tokens, n), torch.nan, dtype=dtype, device="cuda")
            self.contract.check(self.run(arguments, out=out), arguments)

    def test_a_packed_weight_gives_the_same_bits(self) -> None:
        arguments = self.inputs(tokens=40)
        weight = {name: arguments[name] for name in ("b", "b_scale", "b_global_scale")}
        made = kernelhub.fp4_gemm.prepare(**arguments, backend=self.kernel).pack(**weight)
        rest = {name: value for name, value in arguments.items() if name not in weight}
        assert torch.equal(self.run(rest | {"b": made}), self.run(arguments))

    def test_a_captured_call_reads_the_operands_of_each_replay(self) -> None:
        arguments = self.inputs(tokens=40)
        out = torch.empty(40, 96, dtype=torch.bfloat16, device="cuda")
        graph = captured(lambda: self.run(arguments, out=out))
        new = self.inputs(tokens=40, seed=1)
        for name in ("a", "b", "a_scale", "b_scale", "a_global_scale", "b_global_scale"):
            arguments[name].view(-1).view(torch.uint8).copy_(new[name].view(-1).view(torch.uint8))
        out.fill_(torch.nan)
        graph.replay()
        self.contract.check(out, new)

    def test_no_call_waits_for_the_gpu(self) -> None:
        arguments = self.inputs()
        self.contract.check(without_syncs(lambda: self.run(arguments)), arguments)


def test_sums_in_14_bits_beyond_the_limit_are_what_the_record_refuses_them_for() -> None:
    """Forced, to see whether the limit on Ada and Hopper is needed: prints how far off a long K is."""
    if not FAST:
        pytest.skip("only Ada and Hopper add in 14 bits")
    kernel = "cutlass.vllm_scaled_mm"
    need(kernelhub.fp8_gemm, kernel, fp8_gemm_inputs(n=512, k=1024, scaling="row", device="cuda"))
    from kernelhub.ops.gemm.fp8.tolerance import compare

    for k in (2048, 8192, 16384):
        arguments = fp8_gemm_inputs(tokens=64, n=512, k=k, scaling="row", device="cuda", out_dtype=FP16)
        with kernelhub.use(fp8_gemm=kernel, unsafe=True):
            out = kernelhub.fp8_gemm(**arguments)
        agreement = compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=True)
        print(f"K {k}: {agreement}")
        if k == 2048:
            assert agreement.ok
