"""vLLM's Marlin on a GPU: numbers, real layers, graphs, streams, syncs. Skipped where it cannot run."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.errors import NoKernel
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.models.shapes import FP4_LAYERS
from tests.contract import fp4_gemm
from tests.gpu.test_attention_on_gpu import captured
from tests.gpu.test_cutlass_on_gpu import without_syncs

pytestmark = pytest.mark.gpu

TOKENS = (1, 2, 8, 9, 16, 17, 64, 65, 300)


class OfMarlin:
    """Parts of the contract of `fp4_gemm`; the rest is about formats that the kernel does not take."""

    kernel: ClassVar[str]
    form: ClassVar[dict[str, Any]]
    contract = fp4_gemm.Fp4GemmContract()

    @pytest.fixture(autouse=True)
    def able(self) -> None:
        try:
            self.packed(self.inputs())
        except NoKernel as error:
            own = next(item for item in error.selection.decisions if item.kernel == self.kernel)
            pytest.skip(f"{self.kernel}: {'; '.join(rejection.reason for rejection in own.rejections)}")

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return fp4_gemm_inputs(**{"tokens": 5, "n": 96, "k": 256, "device": "cuda", **self.form} | changes)

    def packed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        weight = {name: arguments.get(name) for name in ("b", "b_scale", "b_global_scale")}
        made = kernelhub.fp4_gemm.prepare(**arguments, backend=self.kernel).pack(**weight)
        return {name: value for name, value in arguments.items() if name not in weight} | {"b": made}

    def run(self, packed: dict[str, Any], **more: Any) -> torch.Tensor:
        return kernelhub.fp4_gemm(**packed, **more, backend=self.kernel)

    @pytest.mark.parametrize(("n", "k"), [(1, 64), (96, 192), (64, 128), (320, 832), (5120, 2048)])
    def test_matches_the_reference_in_float64(self, n: int, k: int) -> None:
        for tokens in TOKENS:
            arguments = self.inputs(tokens=tokens, n=n, k=k)
            out = torch.full((tokens, n), torch.nan, dtype=arguments["out_dtype"], device="cuda")
            self.contract.check(self.run(self.packed(arguments), out=out), arguments)

    def test_real_layers(self) -> None:
        form = self.form.get("b_format", "nvfp4")
        for layer in [layer for layer in FP4_LAYERS.values() if layer.b_format == form and layer.k % 64 == 0][-2:]:
            for tokens in (1, 33):
                arguments = self.inputs(tokens=tokens, n=layer.n, k=layer.k)
                self.contract.check(self.run(self.packed(arguments)), arguments)

    def test_a_weight_comes_back_bit_for_bit(self) -> None:
        arguments = self.inputs(n=200, k=320)
        for got, name in zip(self.packed(arguments)["b"].unpack(), ("b", "b_scale", "b_global_scale"), strict=True):
            if got is not None:
                assert torch.equal(got.view(torch.uint8), arguments[name].view(torch.uint8))

    def test_small_activations_keep_their_bits(self) -> None:
        for exponent in (-8, -12):
            arguments = self.inputs(tokens=40, k=2048)
            arguments["a"] = arguments["a"] * 2.0**exponent
            self.contract.check(self.run(self.packed(arguments)), arguments)

    def test_the_same_call_gives_the_same_bits(self) -> None:
        for tokens in (1, 40, 300):
            packed = self.packed(self.inputs(tokens=tokens, n=320, k=4096))
            first = self.run(packed)
            assert all(torch.equal(self.run(packed), first) for _ in range(20))

    def test_rows_may_lie_apart(self) -> None:
        arguments = self.inputs(tokens=7)
        wide = torch.full((7, 520), torch.nan, dtype=arguments["a"].dtype, device="cuda")
        wide[:, :256] = arguments["a"]
        packed = self.packed(arguments)
        assert torch.equal(self.run({**packed, "a": wide[:, :256]}), self.run(packed))

    def test_a_captured_call_reads_the_operands_of_each_replay(self) -> None:
        for tokens in (1, 40):
            packed = self.packed(arguments := self.inputs(tokens=tokens, k=2048))
            out = torch.empty(tokens, 96, dtype=arguments["out_dtype"], device="cuda")
            graph = captured(lambda p=packed, o=out: self.run(p, out=o))
            new = self.inputs(tokens=tokens, k=2048, seed=1)["a"]
            packed["a"].copy_(new)
            for _ in range(50):
                out.fill_(torch.nan)
                graph.replay()
            self.contract.check(out, {**arguments, "a": new})

    def test_streams_do_not_wait_for_each_other_s_blocks(self) -> None:
        arguments = self.inputs(tokens=16, n=1024, k=4096)
        packed = self.packed(arguments)
        want = self.run(packed)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(3)]
        made = []
        for _ in range(50):
            for stream in streams:
                with torch.cuda.stream(stream):
                    made.append(self.run(packed))
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out in made)

    def test_no_call_waits_for_the_gpu(self) -> None:
        packed = self.packed(arguments := self.inputs())
        self.contract.check(without_syncs(lambda: self.run(packed)), arguments)


class TestNvfp4Bfloat16(OfMarlin):
    kernel = "marlin.nvfp4_bfloat16"
    form: ClassVar[dict[str, Any]] = {}

    def test_scales_of_16_powers_of_two_are_exact(self) -> None:
        arguments = self.inputs(n=64, k=2048)
        for low, high in ((4, 0x7F), (1, 0x70)):
            raw = (torch.arange(64 * 128, device="cuda") % (high - low) + low).to(torch.uint8).view(64, 128)
            arguments["b_scale"] = raw.view(torch.float8_e4m3fn)
            self.contract.check(self.run(self.packed(arguments)), arguments)


class TestNvfp4Float16(OfMarlin):
    kernel = "marlin.nvfp4_float16"
    form: ClassVar[dict[str, Any]] = {"a_format": "float16", "out_dtype": torch.float16}

    def test_every_scale_is_exact(self) -> None:
        arguments = self.inputs(n=64, k=2048)
        raw = (torch.arange(64 * 128, device="cuda") % 0x7F).to(torch.uint8).view(64, 128)
        arguments["b_scale"] = raw.view(torch.float8_e4m3fn)
        self.contract.check(self.run(self.packed(arguments)), arguments)


class TestMxfp4(OfMarlin):
    kernel = "marlin.mxfp4"
    form: ClassVar[dict[str, Any]] = {"b_format": "mxfp4"}

    def test_scales_from_end_to_end_are_exact(self) -> None:
        for exponents in ([20, 40, 60, 80], [100, 110, 127, 140], [150, 180, 200, 220]):
            arguments = self.inputs(n=64)
            arguments["b_scale"].view(torch.uint8)[:] = torch.tensor(exponents * 2, dtype=torch.uint8, device="cuda")
            self.contract.check(self.run(self.packed(arguments)), arguments)
