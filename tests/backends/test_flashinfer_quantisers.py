"""FlashInfer's dequantiser gives the bits of `dequantize_nvfp4`, with one of torch that flushes as it does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.backends.flashinfer import kernels as records
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.ops.formats import to_e2m1, to_e4m3, to_e8m0_up
from kernelhub.ops.quant.problem import DequantizeProblem
from kernelhub.probes.device import simulated
from tests.backends import flashinfer_quantisers_fake as fake
from tests.backends.test_flashinfer import OnFake
from tests.contract.quant import same

NAME = "flashinfer.dequantize"
E4M3 = torch.float8_e4m3fn
# From where products leave float32 to where they do: the least numbers of float32 and of float16, and some between.
GLOBALS = [0.0, 1.0, -1.0, 0.37, 1e-3, 2.0**-14, 2.0**-25, 1.5 * 2.0**-24, 2.0**-117, 2.0**-126, 1e-40, 65504.0]
GLOBALS += [3e38, torch.inf, torch.nan]


def every_code_by_every_scale() -> tuple[Tensor, Tensor]:
    """[256, 16 groups]: a row for each scale, in which all bytes of codes occur."""
    codes = torch.arange(128, dtype=torch.uint8).repeat(256, 1)
    codes[1::2] += 128
    return codes, torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16).view(E4M3)


class TestDequantize(OnFake):
    @pytest.mark.parametrize("factor", GLOBALS)
    def test_bits_are_those_of_the_reference(self, factor) -> None:
        codes, scale = every_code_by_every_scale()
        for swapped in (codes, codes.flip(0)):
            given = (swapped, scale, torch.tensor([factor]))
            got = kernelhub.dequantize_nvfp4(*given, out_dtype=torch.float16, backend=NAME)
            assert got.is_contiguous()
            assert same(got, kernelhub.dequantize_nvfp4.reference(*given, out_dtype=torch.float16))

    @pytest.mark.parametrize("shape", [(16,), (1, 16), (3, 2, 48), (5, 2032), (0, 32)])
    def test_any_shape_strides_and_destination(self, shape) -> None:
        x = torch.randn(shape)
        codes, scale, factor = kernelhub.quantize_nvfp4(x, backend="torch.quantize")
        want = kernelhub.dequantize_nvfp4.reference(codes, scale, factor, out_dtype=torch.float16)
        gaps = [torch.stack([part.view(torch.uint8)] * 2, -1).flatten(-2)[..., ::2] for part in (codes, scale)]
        wide = torch.full((*shape[:-1], 2 * shape[-1]), torch.nan, dtype=torch.float16)
        out = wide[..., ::2]
        given = (gaps[0], gaps[1].view(E4M3), factor)
        assert kernelhub.dequantize_nvfp4(*given, out_dtype=torch.float16, out=out, backend=NAME) is out
        assert same(out.contiguous(), want)
        assert wide[..., 1::2].isnan().all()

    def test_long_rows_and_large_tensors_are_given_in_pieces(self, monkeypatch) -> None:
        from kernelhub.backends.flashinfer.quant import nvfp4_kv

        assert nvfp4_kv.columns(1 << 19) == 1 << 19
        assert nvfp4_kv.columns((1 << 19) + 16) == 16
        assert nvfp4_kv.columns(3 << 20) == 1 << 19
        monkeypatch.setattr(nvfp4_kv, "_WIDEST", 64)
        monkeypatch.setattr(nvfp4_kv, "_MOST", 200)
        monkeypatch.setattr(fake, "LARGEST_LAUNCH", 200)
        codes, scale, factor = kernelhub.quantize_nvfp4(torch.randn(5, 192), backend="torch.quantize")
        want = kernelhub.dequantize_nvfp4.reference(codes, scale, factor, out_dtype=torch.float16)
        fake.LAUNCHES.clear()
        assert same(kernelhub.dequantize_nvfp4(codes, scale, factor, out_dtype=torch.float16, backend=NAME), want)
        assert fake.LAUNCHES == [(3, 64)] * 5

    def test_why_bfloat16_is_not_taken(self) -> None:
        """What the library's kernel does there, were it asked."""
        codes, scale = torch.full((1, 8), 0x11, dtype=torch.uint8), torch.ones(1, 1).to(E4M3)
        factor, out = torch.tensor([2.0**-126]), torch.empty(1, 16, dtype=torch.bfloat16)
        fake.nvfp4_kv_dequant(codes, scale.view(torch.uint8), factor, out)
        want = kernelhub.dequantize_nvfp4.reference(codes, scale, factor)
        assert (out == 0).all()
        assert (want == 2.0**-127).all()


class TestWhyTheQuantisersAreNotTaken:
    """The library's arithmetic, as its source has it, on a machine whose reciprocals are rounded as well as can be."""

    def test_nvfp4_multiplies_by_reciprocals(self) -> None:
        x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
        factor = torch.tensor([0.01])
        groups = x.float().unflatten(1, (-1, 16))
        scale = to_e4m3((1 / factor) * (groups.abs().amax(-1) * torch.tensor(1 / 6)))
        codes = to_e2m1((groups * (1 / (scale.float() * factor)).unsqueeze(-1)).flatten(1))
        want = kernelhub.quantize_nvfp4.reference(x, factor)
        assert same(scale, want[1])
        assert not torch.equal(codes, want[0])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_scales_of_mxfp8_differ_for_infinity_and_for_tiny_groups(self, dtype) -> None:
        each = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
        each = each[~each.isnan()]
        scale = to_e8m0_up(fake.flushed(each.float() * torch.tensor(1 / 448)).clamp(max=torch.finfo().max))
        want = kernelhub.quantize_mxfp8.reference(each[:, None].repeat(1, 32), "up")[1].flatten()
        differing = each[scale.view(torch.uint8) != want.view(torch.uint8)].float()
        assert differing[-1] == torch.inf
        assert (differing[:-1] < 448 * 2.0**-126).all()
        assert len(differing) == (128 if dtype is torch.bfloat16 else 1)


@pytest.mark.parametrize(
    ("device", "out_dtype", "codes"),
    [
        ("H200", "float16", set()),
        ("A100", "float16", set()),
        ("B200", "float16", set()),
        ("H200", "bfloat16", {"dtype"}),
        ("H200", "float32", {"dtype"}),
        ("MI300X", "float16", {"vendor"}),
    ],
)
def test_limits_are_reported(device, out_dtype, codes) -> None:
    kernel = next(kernel for kernel in records.KERNELS if kernel.name == NAME)
    problem = DequantizeProblem(device=simulated(device), out_dtype=out_dtype)
    machine = SimulatedMachine({"flashinfer": "0.6.18.post1"})
    found = (constraint.reject(problem, machine) for constraint in kernel.constraints)
    assert {rejection.code for rejection in found if rejection} == codes
