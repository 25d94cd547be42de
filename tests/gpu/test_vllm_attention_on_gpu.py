"""vLLM's builds of FlashAttention on a GPU, where its libraries lie: the contracts, graphs, syncs, unused rows."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.backends.flash_attn import vllm_builds
from kernelhub.errors import NoKernel
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.testing import KernelCase
from tests.conftest import HAS_GPU
from tests.contract.attention import Contract, DenseContract, PagedContract, split
from tests.gpu.test_attention_on_gpu import captured
from tests.gpu.test_cutlass_on_gpu import without_syncs
from tests.gpu.test_flash_attn_on_gpu import agrees, need

pytestmark = pytest.mark.gpu

GROUPED = AttentionModel("grouped", 8, 2, 128, 128)
VARIANTS = ("flash_attn.vllm_fa3", "flash_attn.vllm_fa2")


def able(op: str, kernel: str) -> None:
    """Skip with the reason where the kernel cannot run, or its library not be loaded."""
    need(op, kernel)
    maker = attention_inputs if op == "attention" else paged_attention_inputs
    sizes: dict[str, Any] = {"q_tokens": 4} if op == "attention" else {"seq_lens": (4,)}
    args, kwargs = split(maker(GROUPED, **sizes, device="cuda"))
    try:
        getattr(kernelhub, op).prepare(*args, **kwargs, backend=kernel)
    except NoKernel as error:
        own = next(item for item in error.selection.decisions if item.kernel == kernel)
        pytest.skip(f"{kernel}: {own.reason}")


class OfVllm(Contract):
    device: ClassVar[str] = "cuda"

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        return super().accepted_cases() if HAS_GPU else []

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        able(self.op, self.kernel)


class TestFa3(OfVllm, DenseContract):
    kernel = "flash_attn.vllm_fa3"


class TestFa3Paged(OfVllm, PagedContract):
    kernel = "flash_attn.vllm_fa3"


class TestFa2(OfVllm, DenseContract):
    kernel = "flash_attn.vllm_fa2"


class TestFa2Paged(OfVllm, PagedContract):
    kernel = "flash_attn.vllm_fa2"

    # Its LSE, 8 heads of 16 tokens in float32, fills a block of torch's memory to the end.
    @pytest.mark.parametrize("q_lens", [None, 2, (1,) * 14 + (2,)], ids=["decode", "two queries", "ragged"])
    @pytest.mark.parametrize("window", [None, (40, 0)])
    @pytest.mark.parametrize("return_lse", [False, True])
    def test_what_is_past_its_lse_stays_as_it_is_where_sequences_are_empty(self, q_lens, window, return_lse) -> None:
        call, arguments = self.with_empty_sequences(q_lens, window)
        got, changed = beside_blocks_in_use(lambda: call(return_lse=return_lse))
        assert not changed
        agrees(got, arguments)

    def test_the_library_itself_writes_past_it(self, monkeypatch) -> None:
        """Without what the adapter does: if this fails, the library is fixed, and the adapter may do less."""
        call, _ = self.with_empty_sequences((1,) * 14 + (2,), None)
        monkeypatch.setattr(vllm_builds, "with_keys", lambda ends, page_size, tokens: (ends, None))
        assert beside_blocks_in_use(call)[1]

    def with_empty_sequences(self, q_lens: Any, window: Any) -> tuple[Any, dict[str, Any]]:
        """A call of 8 heads and 16 tokens, of which some see no keys; and its arguments."""
        sequences = 8 if q_lens == 2 else 16 if q_lens is None else 15
        seq_lens = (300, 2) + (0,) * (sequences - 3) + (5,)
        arguments = paged_attention_inputs(GROUPED, seq_lens=seq_lens, q_lens=q_lens, page_size=16, device="cuda")
        arguments |= {"window": window}
        return lambda **more: kernelhub.paged_attention(**arguments, backend=self.kernel, **more), arguments


def beside_blocks_in_use(call: Any) -> tuple[Any, bool]:
    """What a call gives, and whether it changed blocks of torch's memory beside those that were free for it."""
    call()
    blocks = [torch.full((128,), 7.0, device="cuda") for _ in range(4096)]
    neighbours = blocks[::2]
    del blocks
    torch.cuda.synchronize()
    got = call()
    torch.cuda.synchronize()
    return got, any(bool((block != 7.0).any()) for block in neighbours)


@pytest.mark.parametrize("kernel", VARIANTS)
class TestBoth:
    @pytest.mark.parametrize("page_size", [16, 128])
    @pytest.mark.parametrize("q_lens", [None, 4], ids=["decode", "four queries"])
    def test_a_captured_decode_reads_the_lengths_of_each_replay(self, kernel, q_lens, page_size) -> None:
        able("paged_attention", kernel)
        arguments = paged_attention_inputs(
            GROUPED, seq_lens=(3000, 3000, 3000), q_lens=q_lens, page_size=page_size, device="cuda"
        )
        out = torch.empty_like(arguments["q"])
        graph = captured(lambda: kernelhub.paged_attention(**arguments, backend=kernel, out=out))
        for seq_lens in ((3000, 4, 16), (4, 333, 2650)):
            arguments["seq_lens"].copy_(torch.tensor(seq_lens))
            arguments["q"].normal_()
            out.fill_(torch.nan)
            graph.replay()
            agrees(out, arguments)

    @pytest.mark.parametrize("tokens", [1, 8, 200])
    def test_a_captured_batch_sees_new_operands(self, kernel, tokens) -> None:
        able("attention", kernel)
        arguments = attention_inputs(GROUPED, batch=2, q_tokens=tokens, kv_tokens=1000, device="cuda")
        arguments |= {"causal": True}
        out = torch.empty_like(arguments["q"])
        graph = captured(lambda: kernelhub.attention(**arguments, backend=kernel, out=out))
        for name in "qkv":
            arguments[name].normal_()
        out.fill_(torch.nan)
        graph.replay()
        agrees(out, arguments)

    def test_no_call_waits_for_the_gpu(self, kernel) -> None:
        able("paged_attention", kernel)
        paged = paged_attention_inputs(GROUPED, seq_lens=(300, 70), page_size=16, device="cuda")
        agrees(without_syncs(lambda: kernelhub.paged_attention(**paged, backend=kernel)), paged)
        dense = attention_inputs(GROUPED, q_lens=(70, 5), kv_lens=(70, 90), device="cuda")
        agrees(without_syncs(lambda: kernelhub.attention(**dense, max_seqlen_q=70, max_seqlen_k=90, backend=kernel)),
               dense)  # fmt: skip

    @pytest.mark.parametrize("page_size", [16, 64, 80, 128, 256])
    def test_a_nan_in_unused_rows_of_pages_does_not_matter(self, kernel, page_size) -> None:
        able("paged_attention", kernel)
        for q_lens in (None, (60, 1, 7)):
            arguments = paged_attention_inputs(
                GROUPED, seq_lens=(150, 90, 7), q_lens=q_lens, page_size=page_size, device="cuda"
            )
            for i, length in enumerate((150, 90, 7)):
                last = arguments["block_table"][i, (length - 1) // page_size]
                for cache in (arguments["k_cache"], arguments["v_cache"]):
                    cache[last, (length - 1) % page_size + 1 :] = torch.nan
            agrees(kernelhub.paged_attention(**arguments, backend=kernel), arguments)

    def test_widths_that_are_whole_tiles(self, kernel) -> None:
        able("attention", kernel)
        for width in (64, 96, 128, 192, 256):
            model = AttentionModel("grouped", 8, 2, width, width)
            arguments = attention_inputs(model, q_lens=(70, 5), kv_lens=(70, 90), device="cuda") | {"causal": True}
            agrees(kernelhub.attention(**arguments, backend=kernel), arguments)

    def test_the_same_call_gives_the_same_bits(self, kernel) -> None:
        able("paged_attention", kernel)
        arguments = paged_attention_inputs(GROUPED, seq_lens=(3000, 17, 900), page_size=16, device="cuda")
        first = kernelhub.paged_attention(**arguments, backend=kernel)
        assert all(torch.equal(kernelhub.paged_attention(**arguments, backend=kernel), first) for _ in range(20))
