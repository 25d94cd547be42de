"""The whole contracts of the Gluon kernels of attention, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.gluon.mla.adapter import DecodeFloat8
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.models.shapes import AttentionModel
from tests.contract.attention import DenseContract, PagedContract
from tests.contract.mla_attention import MlaContract

pytestmark = pytest.mark.gpu
WIDE = AttentionModel("four heads of 128", 4, 2, 128, 128)  # for kernels that take not all of heads of 64


class TestPipelinedPrefill(DenseContract):
    kernel = "gluon.prefill_pipelined"
    model = WIDE


class TestPagedPipelinedPrefill(PagedContract):
    kernel = "gluon.prefill_pipelined"
    model = WIDE


class TestPipelinedPrefillAny(DenseContract):
    kernel = "gluon.prefill_pipelined_any"


class TestPagedPipelinedPrefillAny(PagedContract):
    kernel = "gluon.prefill_pipelined_any"


class TestDecode(MlaContract):
    kernel = "gluon.decode"
    widths = (512, 64)
    page_size = 64
    fewest_cases = 10


class TestDecodeOfFloat8(MlaContract):
    kernel = "gluon.decode_fp8"
    widths = (512, 64)
    page_size = 64
    fewest_cases = 5
    kv_scale = "tensor"


class TestDecodeOfFloat8InTilesOf64(TestDecodeOfFloat8):
    """What takes more than 16 rows of a sequence, with fewer, too."""

    @pytest.fixture(autouse=True)
    def no_few_rows(self, clean_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DecodeFloat8, "few", False)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("tokens", [None, 3])
def test_decode_of_float8_of_any_lengths(heads: int, tokens: int | None) -> None:
    """Few and many pages, odd numbers of them, sequences of none, shared by programs; always the same bits."""
    for lengths in ((1, 0, 63, 64, 65, 127, 128, 129), (8191, 3, 0, 4097), (0, 0), (32001,), (700, 64) * 150):
        arguments = mla_attention_inputs(
            num_heads=heads, seq_lens=lengths, q_lens=tokens, kv_dtype=torch.float8_e4m3fn, device="cuda"
        )
        got, lse = kernelhub.mla_attention(**arguments, return_lse=True, backend="gluon.decode_fp8")
        want, want_lse = kernelhub.mla_attention(**arguments, return_lse=True, backend="triton.split_kv")
        assert compare_out(got, want, 4.5).ok
        assert compare_lse(lse, want_lse) <= lse_tolerance(got.dtype)
        for _ in range(20):
            again, again_lse = kernelhub.mla_attention(**arguments, return_lse=True, backend="gluon.decode_fp8")
            assert torch.equal(again, got)
            assert torch.equal(again_lse, lse)


@pytest.mark.parametrize("widths", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_pipelined_prefill_of_any_lengths(widths: tuple[int, int]) -> None:
    """Tiles of one step and of many, empty ones, several sections; always the same bits, on two streams at once."""
    model = AttentionModel("groups of two", 16, 8, *widths)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for lengths in ((1, 0, 127, 128, 129, 0, 0), (9000, 3, 0, 4097), (700, 64) * 40, (0, 0), (1,) * 300, (33000,)):
        arguments = attention_inputs(model, q_lens=lengths, kv_lens=lengths, device="cuda") | {"return_lse": True}
        got, lse = kernelhub.attention(**arguments, backend="gluon.prefill_pipelined")
        want, want_lse = kernelhub.attention(**arguments, backend="triton.prefill")
        assert compare_out(got, want, 4.5).ok
        assert compare_lse(lse, want_lse) <= 2 * lse_tolerance(got.dtype)
        torch.cuda.synchronize()
        made = []
        for at in range(20):
            with torch.cuda.stream(streams[at % 2]):
                made.append(kernelhub.attention(**arguments, backend="gluon.prefill_pipelined"))
        torch.cuda.synchronize()
        for again, again_lse in made:
            assert torch.equal(again, got)
            assert torch.equal(again_lse, lse)


class OfFloat8:
    """What keys and values of float8 add to the paged contract."""

    widest = torch.float16
    plain = PagedContract.plain | {"kv_scale": "tensor"}
    rich = PagedContract.plain | {"q_lens": 3, "causal": True, "kv_scale": "head"}

    def test_queries_may_have_any_size_and_factors_any_sign(self) -> None:
        for row, factor in ((0.0, 1e-33), (1e-38, -1e-33), (1e36, 1e-33), (0.0, 0.0), (1.0, -1.0)):
            arguments = self.inputs(**self.rich)
            arguments["q"][0, 1], arguments["q"][2, 0] = (
                row,
                arguments["q"][2, 0] * (1e30 if 0 < abs(factor) < 1 else 1.0),
            )
            arguments["k_scale"] = arguments["k_scale"] * factor
            self.check(self.run(arguments), arguments)


class TestPagedPrefillOfFloat8(OfFloat8, PagedContract):
    kernel = "gluon.prefill_fp8"


class TestPagedPrefillOfFloat8Any(OfFloat8, PagedContract):
    kernel = "gluon.prefill_fp8_any"
    rich = PagedContract.rich | {"kv_scale": "head"}


class TestPrefillOfFloat8(DenseContract):
    kernel = "gluon.prefill_fp8"
    model = WIDE
    widest = torch.float16
    plain = DenseContract.plain | {"kv_scale": "tensor"}
    rich = DenseContract.rich | {"kv_scale": "head"}


class TestPrefillOfFloat8Any(DenseContract):
    kernel = "gluon.prefill_fp8_any"
    widest = torch.float16
    plain = DenseContract.plain | {"kv_scale": "tensor"}
    rich = DenseContract.rich | {"kv_scale": "head"}


@pytest.mark.parametrize("page", [0, 16, 64, 256])
@pytest.mark.parametrize(
    "model",
    [AttentionModel("gpt-oss", 64, 8, 64, 64), AttentionModel("heads of 96", 8, 2, 96, 96)],
    ids=lambda model: model.name,
)
def test_windows_of_gpt_oss_over_float8(model: AttentionModel, page: int) -> None:
    """Of 128, with sinks, in pages and in tensors (0), sequences of no tokens among them; heads of 96, too."""
    more: dict[str, Any] = {
        "window": 128,
        "sinks": torch.linspace(-2, 4, model.num_q_heads, device="cuda"),
        "backend": "gluon.prefill_fp8_any",
    }
    op: Any = kernelhub.paged_attention if page else kernelhub.attention
    for lengths in ((700, 0, 129, 2048), (1, 64, 4000, 0)):
        inputs = {"kv_dtype": torch.float8_e4m3fn, "device": "cuda"}
        if page:
            q_lens = tuple((length + 1) // 2 for length in lengths)
            arguments = paged_attention_inputs(model, seq_lens=lengths, q_lens=q_lens, page_size=page, **inputs)
        else:
            arguments = attention_inputs(model, q_lens=lengths, kv_lens=lengths, **inputs)
        got = op(**arguments | more)
        want = op(**arguments | more | {"backend": "torch.blocked"})
        assert (got.float() - want.float()).abs().max() < 2.0**-6 * want.float().abs().max()


class TestDecodeOfListsOfFloat8(MlaContract):
    kernel = "gluon.decode_listed_fp8"
    widths = (512, 64)
    fewest_cases = 5
    lists_all = True
    kv_scale = "tensor"


class TestDecodeOfLists(MlaContract):
    kernel = "gluon.decode_listed"
    widths = (512, 64)
    fewest_cases = 10
    lists_all = True
