"""vLLM's Marlin of float8 weights on a GPU: numbers, graphs, syncs. Skipped where it cannot run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import NoKernel
from kernelhub.ops.formats import from_e8m0, to_e8m0_up
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare
from kernelhub.ops.models.shapes import FP8_LAYERS
from tests.gpu.test_attention_on_gpu import captured
from tests.gpu.test_cutlass_on_gpu import without_syncs

pytestmark = pytest.mark.gpu

FORMS = ({"scaling": "tensor"}, {"scaling": "row"}, {"scaling": "block"}, {"e8m0": (False, True)})


class TestBfloat16:
    kernel = "marlin.fp8_bfloat16"
    dtype = torch.bfloat16

    @pytest.fixture(autouse=True)
    def able(self) -> None:
        try:
            self.packed(self.inputs())
        except NoKernel as error:
            own = next(item for item in error.selection.decisions if item.kernel == self.kernel)
            pytest.skip(f"{self.kernel}: {'; '.join(rejection.reason for rejection in own.rejections)}")

    def inputs(self, **changes: Any) -> dict[str, Any]:
        """With scales that the format holds."""
        form = {"tokens": 5, "n": 96, "k": 256, "device": "cuda", "weight_only": self.dtype, "out_dtype": self.dtype}
        made = fp8_gemm_inputs(**form | changes)
        scale = made["b_scale"]
        if scale.dtype is torch.float32:
            blocks = changes.get("scaling", "block") == "block"
            made["b_scale"] = from_e8m0(to_e8m0_up(scale)) if blocks else scale.to(self.dtype).float()
        return made

    def packed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        plan = kernelhub.fp8_gemm.prepare(**arguments, backend=self.kernel)
        return arguments | {"b": plan.pack(arguments["b"], arguments["b_scale"]), "b_scale": None}

    def check(self, arguments: dict[str, Any]) -> None:
        out = kernelhub.fp8_gemm(**self.packed(arguments), backend=self.kernel)
        agreement = compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=True)
        assert agreement.ok, str(agreement)

    @pytest.mark.parametrize("form", FORMS, ids=str)
    @pytest.mark.parametrize(("n", "k"), [(1, 128), (96, 384), (64, 128), (320, 896), (5120, 2048)])
    def test_matches_the_reference_in_float64(self, n: int, k: int, form: dict[str, Any]) -> None:
        for tokens in (1, 8, 9, 16, 17, 64, 65, 300):
            self.check(self.inputs(tokens=tokens, n=n, k=k, **form))

    def test_real_layers(self) -> None:
        for layer in list(FP8_LAYERS.values())[-3:]:
            for tokens in (1, 33):
                self.check(self.inputs(tokens=tokens, n=layer.n, k=layer.k, scaling=layer.scaling))

    def test_small_activations_keep_their_bits(self) -> None:
        for exponent in (-8, -12):
            arguments = self.inputs(tokens=40, k=2048)
            self.check(arguments | {"a": arguments["a"] * 2.0**exponent})

    def test_a_captured_call_may_be_replayed(self) -> None:
        packed = self.packed(self.inputs(tokens=9))
        want = kernelhub.fp8_gemm(**packed, backend=self.kernel)
        out = torch.empty_like(want)
        graph = captured(lambda: kernelhub.fp8_gemm(**packed, out=out, backend=self.kernel))
        for _ in range(3):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, want)

    def test_nothing_waits_for_the_device(self) -> None:
        packed = self.packed(self.inputs())
        want = kernelhub.fp8_gemm(**packed, backend=self.kernel)
        assert torch.equal(without_syncs(lambda: kernelhub.fp8_gemm(**packed, backend=self.kernel)), want)


class TestFloat16(TestBfloat16):
    kernel = "marlin.fp8_float16"
    dtype = torch.float16
