"""What only a GPU can show of the quantisers: bits at real sizes, graphs, syncs, no compilation for another size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.triton.quant import dequantize as back_kernels
from kernelhub.backends.triton.quant import quantize as kernels
from kernelhub.ops.quant.inputs import SHAPES, activations
from tests.contract.quant import every_bfloat16, same, special_rows

pytestmark = pytest.mark.gpu

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *(("fp8", {"granularity": granularity}) for granularity in ("tensor", "token", "group", "block")),
    ("fp8", {"granularity": "group", "scale_dtype": torch.float8_e8m0fnu, "scale_layout": "column"}),
    ("nvfp4", {}),
    ("mxfp4", {}),
    ("mxfp4", {"scale_rounding": "up"}),
    ("mxfp8", {}),
    ("mxfp8", {"scale_rounding": "up"}),
]
KERNELS = (
    kernels.groups_kernel,
    kernels.tokens_kernel,
    kernels.given_kernel,
    kernels.blocks_kernel,
    kernels.amax_kernel,
    kernels.scale_kernel,
    back_kernels.dequantize_kernel,
)


def both_ways(format: str) -> tuple[Any, Any]:
    return getattr(kernelhub, f"quantize_{format}"), getattr(kernelhub, f"dequantize_{format}")


def agrees(format: str, options: dict[str, Any], x: torch.Tensor) -> None:
    quantize, dequantize = both_ways(format)
    got = quantize(x, **options, backend="triton")
    want = quantize.reference(x.cpu(), **options)
    for one, other in zip(got, want, strict=True):
        assert same(one.cpu(), other)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        back = dequantize(*got, out_dtype=dtype, backend="triton")
        assert same(back.cpu(), dequantize.reference(*want, out_dtype=dtype))


@pytest.mark.parametrize(("format", "options"), OPTIONS, ids=str)
class TestBits:
    @pytest.mark.parametrize("model", SHAPES)
    def test_at_the_shapes_of_models(self, format, options, model) -> None:
        rows, width = SHAPES[model]
        agrees(format, options, activations(rows // 4, width, device="cuda"))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_of_what_is_no_ordinary_number(self, format, options, dtype) -> None:
        agrees(format, options, special_rows(dtype, 256).cuda())
        agrees(
            format, options, torch.randn(64, 512).to(dtype).mul(torch.logspace(-44, 38, 64)[:, None]).to(dtype).cuda()
        )

    def test_of_every_bfloat16(self, format, options) -> None:
        agrees(format, options, every_bfloat16().cuda())

    def test_beyond_two_to_the_31_elements(self, format, options) -> None:
        if torch.cuda.mem_get_info()[0] < 20 << 30:
            pytest.skip("20 GB of memory are not free: 1 case")
        x = torch.zeros((1 << 18) + 1, 1 << 13, dtype=torch.bfloat16, device="cuda")
        x[-1] = activations(1 << 13)[None].cuda()
        quantize, _ = both_ways(format)
        got = quantize(x, **options, backend="triton")
        if options.get("granularity") in ("tensor", "block") or format == "nvfp4":
            assert got[0].view(torch.uint8)[-1].any()
            return
        want = quantize(x[-1:], **options, backend="triton")
        assert same(got[0][-1:], want[0])
        assert same(got[1][-1:].contiguous(), want[1].contiguous())


@pytest.mark.parametrize(("format", "options"), OPTIONS, ids=str)
class TestSteps:
    def test_a_captured_call_sees_new_operands(self, format, options) -> None:
        quantize, dequantize = both_ways(format)
        x = activations(256, 2048, device="cuda")
        outs = [torch.empty_like(tensor) for tensor in quantize(x, **options, backend="triton")]
        back = torch.empty_like(x)
        names = ("out", "out_scale", "out_global_scale")

        def call() -> None:
            results = quantize(x, **options, **dict(zip(names, outs, strict=False)), backend="triton")
            dequantize(*results, out=back, backend="triton")

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        x.copy_(activations(256, 2048, seed=1))
        graph.replay()
        want = quantize.reference(x.cpu(), **options)
        for out, other in zip(outs, want, strict=True):
            assert same(out.cpu(), other)
        assert same(back.cpu(), dequantize.reference(*want))

    def test_no_call_waits_for_the_gpu(self, format, options) -> None:
        quantize, dequantize = both_ways(format)
        x = activations(64, 2048, device="cuda")
        dequantize(*quantize(x, **options, backend="triton"), backend="triton")
        torch.cuda.set_sync_debug_mode("error")
        try:
            dequantize(*quantize(x, **options, backend="triton"), backend="triton")
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_another_number_of_tokens_compiles_nothing(self, format, options) -> None:
        quantize, dequantize = both_ways(format)

        def compiled() -> int:
            return sum(len(cache[0]) for kernel in KERNELS for cache in kernel.device_caches.values())

        for rows in (256, 512):
            dequantize(*quantize(activations(rows, 2048, device="cuda"), **options, backend="triton"), backend="triton")
        before = compiled()
        for rows in (1, 2, 3, 17, 100, 1000):
            dequantize(*quantize(activations(rows, 2048, device="cuda"), **options, backend="triton"), backend="triton")
        assert compiled() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("granularity", ["tensor", "token"])
def test_a_given_scale_of_any_value_quantises_any_number_as_the_reference(
    granularity: str, backend: str, dtype: torch.dtype
) -> None:
    """NaN and infinity, in x and in the scale: codes are those of the reference on a CPU, bit for bit."""
    inf, nan, largest = torch.inf, torch.nan, torch.finfo(dtype).max
    values = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        inf,
        -inf,
        nan,
        -nan,
        largest,
        -largest,
        torch.finfo(dtype).tiny,
        3.14,
        448.0,
        465.0,
    ]
    scales = [0.0, -0.0, 1.0, -1.0, inf, -inf, nan, 1e-38, 1e-40, 1e-45, -1e-40, 3.4e38]
    scales += [2.0**exponent for exponent in (-91, -90, -89, 89, 90, 91, 120)]
    x = torch.tensor([values * 5]).to(dtype)
    for value in scales:
        scale = torch.tensor([[value]]) if granularity == "token" else torch.tensor([value])
        want, _ = kernelhub.quantize_fp8.reference(x, granularity, scale=scale)
        made, _ = kernelhub.quantize_fp8(x.cuda(), granularity, scale=scale.cuda(), backend=backend)
        wrong = (made.cpu().view(torch.uint8) != want.view(torch.uint8)).nonzero()[:, 1].tolist()
        assert not wrong, f"scale {value}: {[(x[0, at].item(), made.view(torch.uint8)[0, at].item()) for at in wrong]}"
