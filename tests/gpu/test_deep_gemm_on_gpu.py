"""What only a GPU can show of DeepGEMM: that the library does what its documents say, numbers, graphs, no syncs.

A kernel is compiled for each shape class, some seconds each, so shapes are few; with `-n 8` they are compiled at once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.ops.formats import from_e8m0
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs
from kernelhub.ops.models.shapes import FP8_LAYERS
from tests.contract.fp8_gemm import Fp8GemmContract
from tests.contract.grouped_gemm import GroupedGemmContract
from tests.contract.indexer import FP8, LogitsContract, PagedLogitsContract, shaped
from tests.gpu.test_attention_on_gpu import captured

pytestmark = pytest.mark.gpu

EXPONENTS = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10
SUFFIX = "_ue8m0" if EXPONENTS else ""


def need(op: str, kernel: str, **facets: Any) -> None:
    """Skip with the reason where the kernel cannot run, or not be loaded."""
    selection = kernelhub.explain(op, device="cuda", backend=kernel, **facets)
    if selection.selected is None:
        own = next(item for item in selection.decisions if item.kernel == kernel)
        pytest.skip("; ".join(rejection.reason for rejection in own.rejections))


def without_syncs(call: Any) -> torch.Tensor:
    """A call that waits for the GPU raises; the first may, since it compiles."""
    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class TestFp8Blocks(Fp8GemmContract):
    kernel = f"deep_gemm.fp8_blocks{SUFFIX}"
    takes_bias = False
    plain = {"scaling": "block", "n": 192, "k": 256, "e8m0": (EXPONENTS, EXPONENTS)}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def able(self) -> None:
        dtype = "float8_e8m0fnu" if EXPONENTS else "float32"
        need("fp8_gemm", self.kernel, n=192, k=256, a_scale_dtype=dtype, b_scale_dtype=dtype)

    def test_a_captured_call_reads_the_operands_of_each_replay(self) -> None:
        for tokens in (1, 64, 200):
            arguments = self.inputs(tokens=tokens)
            out = torch.empty(tokens, 192, dtype=torch.bfloat16, device="cuda")
            graph = captured(lambda a=arguments, o=out: self.run(a, out=o))
            new = self.inputs(tokens=tokens, seed=1)
            for name in ("a", "b", "a_scale", "b_scale"):
                arguments[name].copy_(new[name])
            out.fill_(torch.nan)
            graph.replay()
            self.agrees(out, new)

    def test_no_call_waits_for_the_gpu(self) -> None:
        arguments = self.inputs()
        self.agrees(without_syncs(lambda: self.run(arguments)), arguments)

    @pytest.mark.parametrize("name", ["deepseek-v3.2 kv_a", "qwen3-30b-a3b o", "deepseek-v3.2 gate_up / 8"])
    def test_layers_of_real_models(self, name: str) -> None:
        layer = FP8_LAYERS[name]
        for tokens in (7, 300):
            small = (EXPONENTS, EXPONENTS)
            arguments = fp8_gemm_inputs(tokens=tokens, n=layer.n, k=layer.k, e8m0=small, device="cuda")
            self.agrees(self.run(arguments), arguments)


def test_powers_of_two_in_a_byte_become_float32_exactly() -> None:
    from kernelhub.backends.deep_gemm.layouts import scales_of_rows

    codes = torch.arange(256, device="cuda").to(torch.uint8).view(32, 8)
    want = from_e8m0(codes)
    assert torch.equal(scales_of_rows(codes, False).nan_to_num(nan=-1.0), want.nan_to_num(nan=-1.0))


class _Grouped:
    """Four groups always, since their number is compiled in."""

    op_kernel: str
    how: dict[str, Any]
    contract = GroupedGemmContract()
    contract.device = "cuda"  # type: ignore[misc]

    @pytest.fixture(autouse=True)
    def able(self) -> None:
        selection = kernelhub.grouped_gemm.explain(**self.inputs(), backend=self.op_kernel)
        if selection.selected is None:
            own = next(item for item in selection.decisions if item.kernel == self.op_kernel)
            pytest.skip("; ".join(rejection.reason for rejection in own.rejections))

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return grouped_gemm_inputs(**{"device": "cuda", "n": 192, "k": 256} | self.how | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> torch.Tensor:
        return kernelhub.grouped_gemm(**arguments, **more, backend=self.op_kernel)

    @pytest.mark.parametrize(
        "sizes", [(1, 0, 0, 0), (5, 0, 19, 1), (127, 128, 129, 0), (300, 0, 1, 120), (0, 0, 0, 0)], ids=str
    )
    @pytest.mark.parametrize("spare", [0, 3])
    def test_matches_the_reference_in_float64(self, sizes: tuple[int, ...], spare: int) -> None:
        arguments = self.inputs(sizes=sizes, spare=spare)
        made = self.run(arguments)
        assert made.is_contiguous()
        if arguments["a"].numel():
            self.contract.check(made, arguments)
            out = torch.full_like(made, torch.nan)
            self.run(arguments, out=out)
            self.contract.check(out, arguments)
            written = ~kernelhub.grouped_gemm.reference(**arguments).isnan()
            assert torch.equal(~out.isnan(), written)
            assert torch.equal(self.run(arguments, out=torch.full_like(made, torch.nan)).nan_to_num(), out.nan_to_num())

    def test_a_captured_call_reads_the_lengths_of_each_replay(self) -> None:
        arguments = self.inputs(sizes=(30, 30, 30, 30), spare=0)
        masked = "group_sizes" in arguments
        out = torch.zeros((4, 30, 192) if masked else (120, 192), device="cuda", dtype=torch.bfloat16)
        graph = captured(lambda: self.run(arguments, out=out))
        for lengths in ((0, 30, 1, 7), (17, 0, 16, 30), (0, 0, 0, 0)):
            new = torch.tensor(lengths, dtype=torch.int32)
            arguments["group_sizes" if masked else "offsets"].copy_(new if masked else new.cumsum(0).int())
            out.fill_(torch.nan)
            graph.replay()
            want = kernelhub.grouped_gemm.reference(**arguments)
            assert torch.equal(out.isnan(), want.isnan())
            self.contract.check(out, arguments)

    def test_no_call_waits_for_the_gpu(self) -> None:
        arguments = self.inputs(sizes=(40, 0, 7, 90))
        self.contract.check(without_syncs(lambda: self.run(arguments)), arguments)


class TestContiguous(_Grouped):
    op_kernel = f"deep_gemm.fp8_contiguous{SUFFIX}"
    how = {"format": "block", "powers_of_two": EXPONENTS}  # noqa: RUF012


class TestContiguousBf16(_Grouped):
    op_kernel = "deep_gemm.bf16_contiguous"
    how = {"format": "bfloat16"}  # noqa: RUF012


class TestMasked(_Grouped):
    op_kernel = f"deep_gemm.fp8_masked{SUFFIX}"
    how = {"format": "block", "masked": True, "powers_of_two": EXPONENTS}  # noqa: RUF012


class TestMaskedBf16(_Grouped):
    op_kernel = "deep_gemm.bf16_masked"
    how = {"format": "bfloat16", "masked": True}  # noqa: RUF012


class TestLogits(LogitsContract):
    kernel = "deep_gemm.logits"

    @pytest.fixture(autouse=True)
    def able(self) -> None:
        need("mqa_logits", self.kernel)

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return super().inputs(**{"model": shaped(64, 128)} | changes)

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs()
        moved = {name: value.repeat_interleave(2, 0)[::2] for name, value in arguments.items() if value.ndim == 1}
        moved["weights"] = arguments["weights"].T.contiguous().T
        moved["q"] = arguments["q"].view(torch.uint8).permute(1, 2, 0).contiguous().permute(2, 0, 1).view(FP8)
        out = torch.zeros(18, 302, device="cuda")[:, 1:301:2]
        self.run(arguments | moved, out=out)
        assert torch.equal(out, self.run(arguments))

    def test_a_captured_call_reads_the_ranges_of_each_replay(self) -> None:
        arguments = self.inputs()
        out = torch.empty(18, 150, device="cuda")
        graph = captured(lambda: self.run(arguments, out=out))
        arguments["cu_seqlen_ke"].fill_(77)
        graph.replay()
        self.check(out, arguments)

    def test_no_call_waits_for_the_gpu(self) -> None:
        arguments = self.inputs()
        self.check(without_syncs(lambda: self.run(arguments)), arguments)

    test_what_is_not_seen_is_not_let_in = None  # of float32
    test_nan_that_is_seen_is_not_hidden = None  # of float32


class TestPagedLogits(PagedLogitsContract):
    kernel = "deep_gemm.logits"

    @pytest.fixture(autouse=True)
    def able(self) -> None:
        need("paged_mqa_logits", self.kernel)

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return super().inputs(**{"model": shaped(64, 128), "page_size": 64} | changes)

    def test_a_captured_call_reads_the_lengths_of_each_replay(self) -> None:
        arguments = self.inputs(fused=True, next_n=2)
        out = torch.empty(4, 131, device="cuda")
        graph = captured(lambda: self.run(arguments, out=out))
        arguments["seq_lens"].copy_(torch.tensor((70, 5)))
        graph.replay()
        self.check(out, arguments)

    def test_no_call_waits_for_the_gpu(self) -> None:
        arguments = self.inputs(fused=True)
        self.check(without_syncs(lambda: self.run(arguments)), arguments)

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        plan = kernelhub.paged_mqa_logits.prepare(**arguments, backend=self.kernel)
        assert torch.equal(plan.run(**arguments), self.run(arguments))

    test_what_is_not_seen_is_not_let_in = None  # of float32
