"""FlashAttention on a GPU, where it is installed: the contracts, graphs, syncs, unused rows of pages, far pages."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import GraphLevel
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.testing import KernelCase
from tests.conftest import HAS_GPU
from tests.contract.attention import Contract, DenseContract, PagedContract, split
from tests.gpu.test_attention_on_gpu import captured

pytestmark = pytest.mark.gpu

GROUPED = AttentionModel("grouped", 8, 2, 128, 128)
RICH = AttentionModel("windowed", 8, 2, 64, 64, window=50)
FEW_HEADS = AttentionModel("sixteen heads of one", 16, 1, 128, 128)


def why_not(op: str, kernel: str, **facets: Any) -> str | None:
    """Why a kernel cannot run on this GPU; None if it can."""
    selection = kernelhub.explain(op, backend=kernel, **facets)
    decision = next(item for item in selection.decisions if item.kernel == kernel)
    return None if decision.accepted else decision.reason


def need(op: str, kernel: str, **facets: Any) -> None:
    reason = why_not(op, kernel, **facets)
    if reason is not None:
        pytest.skip(f"{kernel} cannot run {op} here: {reason}")


class OnThisGpu(Contract):
    """A contract whose cases are none where there is no GPU, and skipped with the reason where there is no library."""

    device: ClassVar[str] = "cuda"
    facets: ClassVar[dict[str, Any]] = {}

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        return super().accepted_cases() if HAS_GPU else []

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        need(self.op, self.kernel, **self.facets)


class TestFa3(OnThisGpu, DenseContract):
    kernel = "flash_attn.fa3"


class TestFa3Paged(OnThisGpu, PagedContract):
    kernel = "flash_attn.fa3"


class TestFa2(OnThisGpu, DenseContract):
    kernel = "flash_attn.fa2"


class TestFa4(OnThisGpu, DenseContract):
    kernel = "flash_attn.fa4"
    facets: ClassVar = {"q_len": "many"}


def agrees(got: Any, arguments: dict[str, Any]) -> None:
    """Compare a result, perhaps with its LSE, with the reference."""
    function = kernelhub.attention if "k" in arguments else kernelhub.paged_attention
    args, kwargs = split(arguments)
    out, lse = got if isinstance(got, tuple) else (got, None)
    want, want_lse = function.reference(*args, **kwargs, return_lse=True)
    agreement = compare_out(out, want, largest_value(arguments))
    assert agreement.ok, str(agreement)
    if lse is not None:
        assert compare_lse(lse, want_lse) <= lse_tolerance(out.dtype)


class TestFa3Graphs:
    kernel = "flash_attn.fa3"

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        need("paged_attention", self.kernel)

    def test_the_records_claim_graphs(self) -> None:
        for op in ("attention", "paged_attention"):
            record = next(k for k in HUB.registry.candidates(op).kernels if k.name == self.kernel)
            assert record.graph is GraphLevel.FULL

    @pytest.mark.parametrize("page_size", [16, 128])
    @pytest.mark.parametrize("q_lens", [None, 4], ids=["decode", "four queries"])
    @pytest.mark.parametrize("model", [GROUPED, RICH], ids=str)
    def test_a_captured_decode_reads_the_lengths_of_each_replay(self, model, q_lens, page_size) -> None:
        arguments = paged_attention_inputs(
            model, seq_lens=(3000, 3000, 3000), q_lens=q_lens, page_size=page_size, device="cuda"
        )
        out = torch.empty_like(arguments["q"])
        graph = captured(lambda: kernelhub.paged_attention(**arguments, backend=self.kernel, out=out))
        for seq_lens in ((3000, 4, 16), (4, 333, 2650)):
            arguments["seq_lens"].copy_(torch.tensor(seq_lens))
            arguments["block_table"].copy_(arguments["block_table"].flip(0))
            arguments["q"].normal_()
            out.fill_(torch.nan)
            graph.replay()
            agrees(out, arguments)

    @pytest.mark.parametrize("page_size", [16, 128])
    def test_a_captured_mixed_step_reads_the_offsets_of_each_replay(self, page_size) -> None:
        arguments = paged_attention_inputs(
            RICH, seq_lens=(90, 40, 70), q_lens=(60, 1, 9), page_size=page_size, device="cuda"
        )
        arguments["max_seqlen_q"] = 70
        out = torch.empty_like(arguments["q"])
        graph = captured(lambda: kernelhub.paged_attention(**arguments, backend=self.kernel, out=out))
        for offsets in ((0, 1, 2, 70), (0, 40, 70, 70), (0, 0, 35, 70)):
            arguments["cu_seqlens_q"].copy_(torch.tensor(offsets))
            out.fill_(torch.nan)
            graph.replay()
            agrees(out, arguments)

    def test_a_captured_step_of_a_plan_is_replayed(self) -> None:
        arguments = paged_attention_inputs(GROUPED, seq_lens=(700, 700), device="cuda")
        args, kwargs = split(arguments)
        out = torch.empty_like(arguments["q"])
        step = kernelhub.paged_attention.prepare(*args, backend=self.kernel, **kwargs).begin(*args[3:])
        graph = captured(lambda: step.run(*args[:3], out=out))
        arguments["seq_lens"].copy_(torch.tensor((1, 650)))
        graph.replay()
        agrees(out, arguments)

    @pytest.mark.parametrize("tokens", [1, 8, 200])
    def test_a_captured_dense_call_sees_new_operands(self, tokens) -> None:
        arguments = attention_inputs(GROUPED, batch=2, q_tokens=tokens, kv_tokens=3000, device="cuda")
        out = torch.empty_like(arguments["q"])
        graph = captured(lambda: kernelhub.attention(**arguments, backend=self.kernel, out=out))
        for name in ("q", "k", "v"):
            arguments[name].normal_()
        graph.replay()
        agrees(out, arguments)


class TestFa3Calls:
    kernel = "flash_attn.fa3"

    @pytest.fixture(autouse=True)
    def installed(self):
        need("paged_attention", self.kernel)
        yield
        torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.parametrize("q_lens", [None, 4, (60, 1, 9)], ids=["decode", "uniform", "mixed"])
    def test_no_call_waits_for_the_gpu(self, q_lens) -> None:
        arguments = paged_attention_inputs(RICH, seq_lens=(90, 40, 70), q_lens=q_lens, page_size=64, device="cuda")
        for _ in range(3):  # decide and bind, then serve
            out = kernelhub.paged_attention(**arguments, backend=self.kernel)
            torch.cuda.set_sync_debug_mode("error")
        torch.cuda.set_sync_debug_mode("default")
        agrees(out, arguments)

    @pytest.mark.parametrize("model", [GROUPED, FEW_HEADS], ids=str)
    @pytest.mark.parametrize("page_size", [64, 128, 256, 512])
    @pytest.mark.parametrize("q_lens", [None, 16, (300, 1, 7)], ids=["decode", "sixteen", "mixed"])
    def test_nan_in_unused_rows_of_large_pages_does_not_matter(self, model, page_size, q_lens) -> None:
        arguments = paged_attention_inputs(
            model, seq_lens=(450, 90, 27), q_lens=q_lens, page_size=page_size, device="cuda"
        )
        agrees(kernelhub.paged_attention(**arguments, return_lse=True, backend=self.kernel), arguments)

    @pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
    @pytest.mark.parametrize("page_size", [1, 16, 128])
    def test_real_sizes(self, page_size, kv_layout) -> None:
        model = AttentionModel("a rank of llama-3.1-70b", 16, 2, 128, 128)
        for seq_lens, q_lens in (((4096,) * 8, None), ((2000, 1500), (1200, 1500)), ((1, 5000, 300), (1, 2, 3))):
            generator = torch.Generator("cuda").manual_seed(1)
            arguments = paged_attention_inputs(
                model,
                seq_lens=seq_lens,
                q_lens=q_lens,
                page_size=page_size,
                kv_layout=kv_layout,
                device="cuda",
                generator=generator,
            )
            agrees(kernelhub.paged_attention(**arguments, return_lse=True, backend=self.kernel), arguments)

    @pytest.mark.parametrize("width", [40, 64, 72, 96, 128, 160, 192, 256])
    def test_every_width_of_tiles(self, width) -> None:
        model = AttentionModel("wide", 6, 2, width, width)
        for more in ({"q_tokens": 400}, {"q_tokens": 3, "kv_tokens": 2500}):
            arguments = attention_inputs(model, batch=2, device="cuda", **more)
            agrees(kernelhub.attention(**arguments, return_lse=True, backend=self.kernel), arguments)
        for page_size in (16, 128):
            paged = paged_attention_inputs(
                model, seq_lens=(700, 33), q_lens=(200, 1), page_size=page_size, device="cuda"
            )
            agrees(kernelhub.paged_attention(**paged, return_lse=True, backend=self.kernel), paged)

    def test_many_sequences(self) -> None:
        lengths = [1 + 37 * i % 200 for i in range(1100)]  # more than one block of the library's scheduler plans for
        arguments = paged_attention_inputs(GROUPED, seq_lens=lengths, device="cuda")
        agrees(kernelhub.paged_attention(**arguments, return_lse=True, backend=self.kernel), arguments)

    def test_a_page_beyond_two_to_the_31_elements(self) -> None:
        pages, page_size = 70_000, 256
        cache = torch.full((pages, page_size, 1, 128), 3.0, dtype=torch.bfloat16, device="cuda")
        assert cache.numel() > 1 << 31
        tokens = torch.randn(2, 4 * page_size, 1, 128, device="cuda").to(torch.bfloat16)
        far = torch.tensor([pages - 1, 7, pages - 3, 65_537], dtype=torch.int32, device="cuda")
        k_cache, v_cache = cache, cache.clone()
        for held, values in ((k_cache, tokens[0]), (v_cache, tokens[1])):
            held[far.long()] = values.view(4, page_size, 1, 128)
        lengths = torch.tensor([1000], dtype=torch.int32, device="cuda")
        for queries in (1, 300):
            q = torch.randn(1, queries, 4, 128, device="cuda").to(torch.bfloat16)
            out = kernelhub.paged_attention(q, k_cache, v_cache, far[None], lengths, backend=self.kernel)
            want = kernelhub.attention.reference(q, tokens[:1, :1000], tokens[1:, :1000], causal=True)
            assert compare_out(out, want, float(tokens[1].abs().max())).ok

    def test_work_goes_to_the_current_stream(self) -> None:
        arguments = paged_attention_inputs(GROUPED, seq_lens=(4000, 100), device="cuda")
        want = kernelhub.paged_attention(**arguments, backend=self.kernel)
        late = torch.randn_like(arguments["q"])
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            arguments["q"].copy_(late)
            out = kernelhub.paged_attention(**arguments, backend=self.kernel)
        torch.cuda.synchronize()
        assert not torch.equal(out, want)
        agrees(out, arguments)

    def test_inductor_keeps_the_numbers(self) -> None:
        arguments = attention_inputs(RICH, batch=2, q_tokens=40, device="cuda")
        torch._dynamo.reset()
        run = torch.compile(lambda given: kernelhub.attention(**given, backend=self.kernel) * 1, fullgraph=True)
        agrees(run(arguments), arguments)
