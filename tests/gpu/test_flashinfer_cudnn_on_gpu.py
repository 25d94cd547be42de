"""cuDNN's attention as FlashInfer calls it, on a GPU. What is known to be bad is forced, on operands it is right with.

Releases before 0.7.1 keep graphs by shapes alone, so there the library is made to forget them before each call, and
decodes bfloat16 only.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.evidence.call import GuardedCall
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.case import Case
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.probes.package import fits, package
from tests.contract.attention import DenseContract, PagedContract, split
from tests.contract.varied_attention import varied, with_finite_ends
from tests.gpu.forced import Forced, forcing

pytestmark = pytest.mark.gpu

MODEL = AttentionModel("grouped", 8, 2, 128, 128)
VERSION = package("flashinfer", distribution="flashinfer-python").value
OLD = VERSION is not None and fits(VERSION, "<0.7.1")
PAGED = ("flashinfer.cudnn_decode", "flashinfer.cudnn_prefill")
LENGTHS = (
    (9000, 1, 513, 4096, 0),
    (300, 77, 64),
    (1,) * 40,
    (17, 33, 65, 129, 257, 1025, 5000),
    (131000,),
    tuple(range(1, 260, 2)),
)


def forget_graphs() -> None:
    """Empty what the library keeps its graphs in, where it would take one for another."""
    if not OLD:
        return
    for name in ("decode", "prefill"):
        module = importlib.import_module(f"flashinfer.cudnn.{name}")
        keeper = getattr(module, f"_build_{name}_graph").__wrapped__
        held = dict(zip(keeper.__code__.co_freevars, keeper.__closure__, strict=True))
        held["cache"].cell_contents.clear()


@pytest.fixture(autouse=True)
def nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    monkeypatch.setenv("FLASHINFER_NO_DOWNLOAD", "1")


class Wide(Forced):
    """With heads of the width that the library names, and graphs forgotten where they are mixed up."""

    model = MODEL

    @pytest.fixture(autouse=True)
    def graphs_are_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        once = GuardedCall._run

        def after_none(call: GuardedCall, given: dict[str, Any]) -> Any:
            forget_graphs()
            return once(call, given)

        monkeypatch.setattr(GuardedCall, "_run", after_none)

    def run(self, arguments: dict[str, Any], **more: Any) -> Any:
        forget_graphs()
        return super().run(arguments, **more)


class TestDecode(Wide, PagedContract):
    kernel = "flashinfer.cudnn_decode"
    rich = PagedContract.plain

    @classmethod
    def takes(cls, case: Case) -> bool:
        dtype = case.make(torch.device(cls.device))["q"].dtype
        return super().takes(case) and (dtype is torch.bfloat16 or not OLD)


class TestPrefill(Wide, PagedContract):
    kernel = "flashinfer.cudnn_prefill"
    table = varied("paged_attention", change=with_finite_ends)
    rich: ClassVar = PagedContract.plain | {"q_lens": 3, "causal": True}


class TestRagged(Wide, DenseContract):
    kernel = "flashinfer.cudnn_ragged"


def agrees(kernel: str, arguments: dict[str, Any]) -> torch.Tensor:
    """Compare the kernel, with LSE if it supports it, with the reference."""
    args, kwargs = split(arguments)
    op = kernelhub.attention if "k" in arguments else kernelhub.paged_attention
    forget_graphs()
    got = op(*args, backend=kernel, return_lse=kernel != PAGED[0], **kwargs)
    out, lse = got if isinstance(got, tuple) else (got, None)
    want, want_lse = op.reference(*args, return_lse=True, **kwargs)
    agreement = compare_out(out, want, largest_value(arguments))
    assert agreement.ok, str(agreement)
    assert lse is None or compare_lse(lse, want_lse) <= lse_tolerance(out.dtype)
    return out


class TestPages:
    @pytest.mark.parametrize("dtype", [torch.bfloat16] if OLD else [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("heads", [(8, 2), (64, 8), (16, 16), (40, 8), (28, 4), (32, 1)])
    @pytest.mark.parametrize(("page_size", "layout"), [(16, "NHD"), (64, "HND"), (128, "HND"), (256, "NHD")])
    def test_decode_at_real_sizes_with_nan_behind_every_sequence(self, page_size, layout, heads, dtype) -> None:
        model = AttentionModel("decode", *heads, 128, 128)
        for seq_lens in LENGTHS:
            arguments = paged_attention_inputs(
                model, seq_lens=seq_lens, page_size=page_size, kv_layout=layout, dtype=dtype, device="cuda"
            )
            with forcing(PAGED[0], arguments):
                agrees(PAGED[0], arguments)

    @pytest.mark.parametrize(("page_size", "layout"), [(16, "NHD"), (64, "HND"), (256, "NHD")])
    def test_one_query_by_the_kernel_for_many(self, page_size, layout) -> None:
        inputs = paged_attention_inputs(
            MODEL, seq_lens=LENGTHS[0], page_size=page_size, kv_layout=layout, device="cuda"
        )
        with forcing(PAGED[1], inputs):
            agrees(PAGED[1], with_finite_ends(inputs))

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("q_lens", [4, (3000, 1, 100, 3, 60)], ids=["speculative", "mixed"])
    def test_prefill_at_real_sizes(self, q_lens, causal) -> None:
        form = {"seq_lens": (3000, 70, 500, 0, 40), "q_lens": q_lens, "page_size": 64}
        arguments = with_finite_ends(paged_attention_inputs(MODEL, device="cuda", **form))
        with forcing(PAGED[1], arguments):
            agrees(PAGED[1], arguments | {"causal": causal})

    def test_the_known_defect_is_still_there(self) -> None:
        """NaN in the unused end of a page. Fails where it is gone, which is when its entry can go."""
        arguments = paged_attention_inputs(MODEL, seq_lens=(300, 77, 64), page_size=64, device="cuda")
        with forcing(PAGED[1], arguments):
            want = agrees(PAGED[1], with_finite_ends(arguments))
            forget_graphs()
            args, kwargs = split(arguments)
            out = kernelhub.paged_attention(*args, backend=PAGED[1], **kwargs)
        assert torch.equal(out[2], want[2]), "a sequence that ends with its page"
        here = f"cuDNN {torch.backends.cudnn.version()} on {torch.cuda.get_device_name()}"
        if torch.equal(out, want):
            pytest.fail(f"NaN in the ends of pages does not matter to {here}: narrow {PAGED[1]}'s entry in KNOWN_BAD")
        assert out[:2].isnan().any(), f"{here} gives other numbers, though no NaN"


class TestPacked:
    kernel = "flashinfer.cudnn_ragged"

    @pytest.mark.parametrize("widths", [(128, 128), (192, 128)])
    def test_packed_sequences_at_real_sizes(self, widths) -> None:
        model = AttentionModel("prefill", 16, 16, *widths)
        arguments = attention_inputs(model, q_lens=(2000, 0, 1, 700), kv_lens=(2000, 5, 300, 700), device="cuda")
        with forcing(self.kernel, arguments):
            for causal in (False, True):
                agrees(self.kernel, arguments | {"causal": causal})

    def test_what_is_around_a_sequence_does_not_reach_it(self) -> None:
        arguments = attention_inputs(MODEL, q_lens=(100, 77, 30), kv_lens=(300, 77, 130), device="cuda")
        with forcing(self.kernel, arguments):
            want = agrees(self.kernel, arguments)
            for name in ("k", "v"):
                ends = torch.full_like(arguments[name][:200], torch.nan)
                arguments[name] = torch.cat([arguments[name], ends])
            assert torch.equal(agrees(self.kernel, arguments), want)
            for name in ("k", "v"):
                arguments[name][300:377] = torch.nan
            args, kwargs = split(arguments)
            out = kernelhub.attention(*args, backend=self.kernel, **kwargs)
            for mine in (slice(0, 100), slice(177, None)):
                assert torch.equal(out[mine], want[mine]), "a neighbour's values reach a sequence"
