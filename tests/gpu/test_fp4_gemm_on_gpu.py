"""What only a GPU can show of `fp4_gemm`: numbers at real sizes, graphs, syncs, no compilation for another size."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.triton.gemm.finish import finish_kernel
from kernelhub.backends.triton.gemm.fp4.decode import decode_kernel
from kernelhub.backends.triton.gemm.fp4.gemm import gemm_kernel, sum_kernel
from kernelhub.backends.triton.gemm.fp4.parts import parts_kernel
from kernelhub.backends.triton.gemm.fp4.pieces import piece_planes_kernel
from kernelhub.backends.triton.gemm.fp4.sliced import sliced_kernel
from kernelhub.evidence.cases import CASES
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp4.problem import A_FORMATS, B_FORMATS
from kernelhub.ops.models.shapes import FP4_LAYERS
from tests.contract.fp4_gemm import weight

pytestmark = pytest.mark.gpu

KERNEL = "triton.fp4_gemm"


def packed(arguments: dict[str, Any]) -> dict[str, Any]:
    made = kernelhub.fp4_gemm.prepare(**arguments, backend=KERNEL).pack(**weight(arguments))
    return {name: value for name, value in arguments.items() if not name.startswith("b_")} | {"b": made}


def agrees(got: torch.Tensor, arguments: dict[str, Any]) -> None:
    judgement = CASES["fp4_gemm"].judge({"out": got}, arguments)
    assert judgement.ok, judgement.figures
    want = kernelhub.fp4_gemm.reference(**arguments, dtype=torch.float64)
    # What is wrong in one direction, a scale by one percent, say, shows in the mean long before it does anywhere.
    assert abs(float((got.double() * want).sum() / (want * want).sum()) - 1.0) < 1e-3


class TestNumbers:
    @pytest.mark.parametrize("layer", [name for name, layer in FP4_LAYERS.items() if layer.n * layer.k < 1 << 28])
    def test_at_the_shapes_of_models(self, layer: str) -> None:
        shape = FP4_LAYERS[layer]
        most = fp4_gemm_inputs(tokens=600, n=shape.n, k=shape.k, b_format=shape.b_format, device="cuda")
        in_tiles = packed(most)
        for tokens in (1, 16, 24, 48, 300, 600):
            arguments = most | {"a": most["a"][:tokens]}
            got = kernelhub.fp4_gemm(**arguments, backend=KERNEL)
            agrees(got, arguments)
            assert torch.equal(kernelhub.fp4_gemm(**in_tiles | {"a": arguments["a"]}, backend=KERNEL), got)

    @pytest.mark.parametrize(("a_format", "b_format"), itertools.product(A_FORMATS, B_FORMATS))
    @pytest.mark.parametrize("tokens", [3, 32, 64, 500, 700])
    def test_of_every_format(self, a_format: str, b_format: str, tokens: int) -> None:
        for n, k in ((1024, 2048), (1000, 2080)):
            more = {"bias": True, "out_dtype": torch.float32} if n == 1000 else {}
            arguments = fp4_gemm_inputs(
                tokens=tokens, n=n, k=k, a_format=a_format, b_format=b_format, device="cuda", **more
            )
            got = kernelhub.fp4_gemm(**arguments, backend=KERNEL)
            agrees(got, arguments)
            assert torch.equal(kernelhub.fp4_gemm(**packed(arguments), backend=KERNEL), got)

    def test_the_torch_kernel_agrees(self) -> None:
        arguments = fp4_gemm_inputs(tokens=100, n=1000, k=2048, a_format="nvfp4", device="cuda")
        agrees(kernelhub.fp4_gemm(**arguments, backend="torch"), arguments)

    def test_a_result_beyond_two_to_the_31_elements(self) -> None:
        if torch.cuda.mem_get_info()[0] < 12 << 30:
            pytest.skip("12 GB of memory are not free: 1 case")
        arguments = fp4_gemm_inputs(tokens=4, n=1 << 16, k=64, device="cuda")
        rows = (1 << 15) + 3
        a = arguments["a"].repeat(-(-rows // 4), 1)[:rows]
        got = kernelhub.fp4_gemm(**{**arguments, "a": a}, backend=KERNEL)
        few = {**arguments, "a": a[-70:]}
        assert torch.equal(got[-70:], kernelhub.fp4_gemm(**few, backend=KERNEL))


class TestSteps:
    @pytest.mark.parametrize("pack", [False, True], ids=["checkpoint", "packed"])
    @pytest.mark.parametrize("tokens", [4, 100, 600])
    def test_a_captured_call_sees_new_operands(self, tokens: int, pack: bool) -> None:
        arguments = fp4_gemm_inputs(tokens=tokens, n=1024, k=4096, device="cuda")
        call = packed(arguments) if pack else arguments
        out = torch.empty(tokens, 1024, dtype=torch.bfloat16, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                kernelhub.fp4_gemm(**call, out=out, backend=KERNEL)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernelhub.fp4_gemm(**call, out=out, backend=KERNEL)
        arguments["a"].normal_()
        out.fill_(torch.nan)
        graph.replay()
        agrees(out, arguments)

    @pytest.mark.parametrize("tokens", [4, 100, 600])
    def test_no_call_waits_for_the_gpu(self, tokens: int) -> None:
        calls = []
        for a_format in A_FORMATS:
            arguments = fp4_gemm_inputs(tokens=tokens, n=256, k=1024, a_format=a_format, bias=True, device="cuda")
            calls += [arguments, packed(arguments)]
        for call in calls:
            kernelhub.fp4_gemm(**call, backend=KERNEL)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for call in calls:
                kernelhub.fp4_gemm(**call, backend=KERNEL)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_another_number_of_tokens_compiles_nothing(self) -> None:
        kernels = (gemm_kernel, sum_kernel, decode_kernel, finish_kernel)

        def compiled() -> int:
            return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

        # 40000 rows of activations leave room for 1024 rows of the weight at a time.
        arguments = fp4_gemm_inputs(tokens=4, n=2048, k=4096, device="cuda")
        a = arguments["a"].repeat(10000, 1)
        for tokens in (8, 16, 32, 64, 128, 512):
            kernelhub.fp4_gemm(**{**arguments, "a": a[:tokens]}, backend=KERNEL)
        before = compiled()
        for tokens in (1, 2, 7, 9, 15, 17, 31, 33, 63, 65, 127, 129, 1000, 40000):
            kernelhub.fp4_gemm(**{**arguments, "a": a[:tokens]}, backend=KERNEL)
        assert compiled() == before

    @pytest.mark.parametrize("b_format", B_FORMATS)
    def test_another_number_of_few_tokens_compiles_nothing(self, b_format: str) -> None:
        kernels = (gemm_kernel, sum_kernel, sliced_kernel, parts_kernel, piece_planes_kernel)

        def compiled() -> int:
            return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

        arguments = fp4_gemm_inputs(tokens=64, n=4096, k=4096, b_format=b_format, device="cuda")
        a = arguments["a"]
        for tokens in (8, 16, 32, 64):
            kernelhub.fp4_gemm(**{**arguments, "a": a[:tokens]}, backend=KERNEL)
        before = compiled()
        for tokens in (1, 2, 7, 9, 15, 17, 31, 33, 48, 63):
            kernelhub.fp4_gemm(**{**arguments, "a": a[:tokens]}, backend=KERNEL)
        assert compiled() == before
