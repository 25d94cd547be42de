"""`fp8_gemm` of activations that are not quantised: the contract, and what catches kernels that lie about it."""

from __future__ import annotations

import pytest

import kernelhub
from kernelhub.backends.torch.gemm.fp8.dequantized import Dequantized
from kernelhub.backends.triton.gemm.fp8.adapter import Fp8Gemm
from kernelhub.backends.triton.gemm.fp8.tiles import tiles_of_weights
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.errors import ConfigurationError
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare
from kernelhub.probes.device import SIMULATED, simulated
from tests.conftest import HAS_GPU
from tests.contract.test_liars import failures
from tests.contract.weight_only import BF16, FP16, FP32, WeightOnlyContract
from tests.dispatch.backends import register

GPUS = ("A100", "L40S", "H200", "B200", "RTX5090")


class TestTorch(WeightOnlyContract):
    kernel = "torch.dequantized"


class TestTriton(WeightOnlyContract):
    kernel = "triton.fp8_gemm"
    most_elements = None if HAS_GPU else 100_000  # of the largest tensor that is interpreted within seconds


class Lie(WeightOnlyContract):
    """The contract over one of the kernels below, on a third of the cases, for a test that collects none of it."""

    kernel = "liar.k"
    device = "cpu"
    __test__ = False

    @classmethod
    def accepted_cases(cls):
        return super().accepted_cases()[::3]


class Truth(Dequantized):
    pass


class ForgetsTheBias(Dequantized):
    def launch_weights(self, a, b, b_scale, bias, out):
        super().launch_weights(a, b, b_scale, None, out)


class OneScaleForAll(Dequantized):
    def launch_weights(self, a, b, b_scale, bias, out):
        super().launch_weights(a, b, b_scale.reshape(-1)[:1].expand(b_scale.numel()).view(b_scale.shape), bias, out)


class RoundsScalesToHalves(Dequantized):
    """As kernels do whose scales are of the activations' dtype."""

    def launch_weights(self, a, b, b_scale, bias, out):
        rounded = b_scale if b_scale.itemsize == 1 else b_scale.bfloat16().float()
        super().launch_weights(a, b, rounded, bias, out)


class QuantisesActivations(Dequantized):
    def launch_weights(self, a, b, b_scale, bias, out):
        scale = a.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / 448
        super().launch_weights((a / scale).to(b.dtype).float() * scale, b, b_scale, bias, out)


class RoundsTwice(Dequantized):
    def launch_weights(self, a, b, b_scale, bias, out):
        super().launch_weights(a, b, b_scale, bias, out)
        out.copy_(out.to(a.dtype))


LIES = [lie for lie in Dequantized.__subclasses__() if lie.__module__ == __name__]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_is_detected(lie) -> None:
    facets = ("device", "scaling", "n", "k", "rows", "out_dtype", "a_scale_dtype", "b_scale_dtype")
    features = frozenset({"bias", "weight_only=bfloat16", "weight_only=float16"})
    target = f"{__name__}:{lie.__name__}"
    register("liar", Kernel("fp8_gemm", "liar.k", target, "lies", Band.PLUGIN, (anything(*facets),), features))
    assert bool(failures(Lie, "liar.k", "cpu")) == (lie is not Truth)


@pytest.mark.skipif(HAS_GPU, reason="tiles of GPUs that are not here are interpreted: 10 cases")
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("device", GPUS)
def test_tiles_of_other_gpus_are_right(device: str, dtype) -> None:
    for tokens, k in ((3, 256), (40, 288), (150, 130)):
        arguments = fp8_gemm_inputs(tokens=tokens, n=136, k=k, weight_only=dtype, out_dtype=FP32)
        problem = kernelhub.fp8_gemm.explain(**arguments, device=simulated(device)).problem
        out = arguments["a"].new_empty((tokens, 136), dtype=FP32)
        Fp8Gemm(problem).launch_weights(arguments["a"], arguments["b"], arguments["b_scale"], None, out)
        assert compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=False).ok


def test_a_block_of_scales_is_a_step() -> None:
    for device in SIMULATED.values():
        for rows in (1, 20, 64, 65, 4096):
            tile = tiles_of_weights(device, rows, 4096)
            assert tile.block_k == 128
            assert 128 % tile.block_n == 0


def test_kernels_of_float8_by_float8_are_refused_with_the_dtype() -> None:
    selection = kernelhub.explain("fp8_gemm", device="H200", weight_only="bfloat16")
    assert selection.selected == "triton.fp8_gemm"
    other = next(item for item in selection.decisions if item.kernel == "torch.scaled_mm_blockwise")
    assert "weight_only=bfloat16" in "; ".join(rejection.reason for rejection in other.rejections)


@pytest.mark.parametrize(
    ("facets", "words"),
    [
        ({"scaling": "mx"}, "1 x 32 blocks"),
        ({"scaling": "row", "b_scale_dtype": "float8_e8m0fnu"}, "float32"),
        ({"a_scale_dtype": "float8_e8m0fnu"}, "weight_only lacks"),
    ],
)
def test_facets_that_cannot_stand_together_are_refused(facets, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        kernelhub.explain("fp8_gemm", device="H200", weight_only="bfloat16", **facets)
