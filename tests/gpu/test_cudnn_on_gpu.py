"""cuDNN on a GPU: the contracts of attention, real sizes, what lies around a sequence. Skipped where it cannot run.

Over pages its kernel is known to be bad, so it is forced, on caches whose unused ends are finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.models.shapes import AttentionModel
from tests.contract.attention import DenseContract, PagedContract, split
from tests.contract.varied_attention import varied, with_finite_ends
from tests.gpu.forced import Forced, forcing

pytestmark = pytest.mark.gpu

KERNEL = "cudnn.sdpa"
PAGED = "cudnn.sdpa_paged"
GROUPED = AttentionModel("grouped", 8, 2, 128, 128)


def needs(arguments: dict[str, Any]) -> None:
    """Skip where the kernel cannot run, with the reason."""
    args, kwargs = split(arguments)
    selection = kernelhub.attention.explain(*args, backend=KERNEL, **kwargs)
    if selection.selected != KERNEL:
        decision = next(item for item in selection.decisions if item.kernel == KERNEL)
        pytest.skip(f"{KERNEL}: {decision.reason}")


def agrees(arguments: dict[str, Any]) -> torch.Tensor:
    args, kwargs = split(arguments)
    out, lse = kernelhub.attention(*args, backend=KERNEL, return_lse=True, **kwargs)
    want, want_lse = kernelhub.attention.reference(*args, return_lse=True, **kwargs)
    agreement = compare_out(out, want, largest_value(arguments))
    assert agreement.ok, str(agreement)
    assert compare_lse(lse, want_lse) <= lse_tolerance(out.dtype)
    return out


class TestSdpa(DenseContract):
    kernel = KERNEL

    @pytest.fixture(autouse=True)
    def present(self) -> None:
        needs(self.inputs(**self.plain))


class TestNumbers:
    @pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128), (256, 256)])
    @pytest.mark.parametrize(
        "lens",
        [
            ((3000, 100, 1, 900), (3000, 100, 1, 900)),
            ((500, 100, 0, 7, 60), (3000, 100, 40, 0, 20)),
            ((1, 1, 1), (700, 3, 2000)),
        ],
        ids=["prefill", "chunked", "one query"],
    )
    def test_ragged(self, lens, widths) -> None:
        model = AttentionModel("wide", 8, 2, *widths)
        arguments = attention_inputs(model, q_lens=lens[0], kv_lens=lens[1], device="cuda") | {"causal": True}
        needs(arguments)
        agrees(arguments)
        agrees(arguments | {"window": (100, 0)})
        agrees(arguments | {"causal": False})

    def test_what_is_around_a_sequence_does_not_reach_it(self) -> None:
        arguments = attention_inputs(GROUPED, q_lens=(100, 77, 30), kv_lens=(300, 77, 130), device="cuda")
        arguments |= {"causal": True}
        needs(arguments)
        want = agrees(arguments)
        for name in ("q", "k", "v"):
            around = torch.full((len(arguments[name]) + 600, *arguments[name].shape[1:]), torch.nan, device="cuda")
            around = around.to(arguments[name].dtype)
            around[300:-300] = arguments[name]
            arguments[name] = around[300:-300]
        assert torch.equal(agrees(arguments), want)
        arguments["k"][300:377] = torch.nan
        arguments["v"][300:377] = torch.nan
        args, kwargs = split(arguments)
        out = kernelhub.attention(*args, backend=KERNEL, **kwargs)
        for mine in (slice(0, 100), slice(177, None)):
            assert torch.equal(out[mine], want[mine]), "a neighbour's values reach a sequence"

    def test_tokens_past_the_last_offset_are_left_alone(self) -> None:
        arguments = attention_inputs(GROUPED, q_lens=(100, 77), kv_lens=(300, 77), device="cuda") | {"causal": True}
        needs(arguments)
        want = agrees(arguments)
        longer = arguments | {"q": torch.cat([arguments["q"], arguments["q"][:50]])}
        args, kwargs = split(longer)
        out = torch.full_like(longer["q"], -777.0)
        kernelhub.attention(*args, backend=KERNEL, out=out, **kwargs)
        assert (out[-50:] == -777.0).all()
        assert torch.equal(out[:-50], want)

    def test_no_call_waits_for_the_gpu(self) -> None:
        arguments = attention_inputs(GROUPED, q_lens=(100, 77), kv_lens=(300, 77), device="cuda") | {"causal": True}
        needs(arguments)
        args, kwargs = split(arguments)
        try:
            for _ in range(3):
                kernelhub.attention(*args, backend=KERNEL, **kwargs)
                torch.cuda.set_sync_debug_mode("error")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        agrees(arguments)


def pages_agree(arguments: dict[str, Any]) -> torch.Tensor:
    with kernelhub.use(unsafe=True):
        out, lse = kernelhub.paged_attention(**arguments, backend=PAGED, return_lse=True)
    want, want_lse = kernelhub.paged_attention.reference(**arguments, return_lse=True)
    agreement = compare_out(out, want, largest_value(arguments))
    assert agreement.ok, str(agreement)
    assert compare_lse(lse, want_lse) <= lse_tolerance(out.dtype)
    return out


class TestSdpaPaged(Forced, PagedContract):
    kernel = PAGED
    table = varied("paged_attention", change=with_finite_ends)


class TestPages:
    @pytest.fixture(autouse=True)
    def forced(self) -> Iterator[None]:
        with forcing(PAGED, paged_attention_inputs(GROUPED, seq_lens=(40, 9), device="cuda")):
            yield

    @pytest.mark.parametrize(("page_size", "layout"), [(16, "NHD"), (64, "HND"), (256, "NHD")])
    @pytest.mark.parametrize("widths", [(64, 64), (128, 128), (256, 256)])
    @pytest.mark.parametrize(
        "form",
        [
            {"seq_lens": (9000, 1, 513, 4096, 0)},
            {"seq_lens": (700, 3000, 64, 5), "q_lens": 4},
            {"seq_lens": (3000, 70, 500, 0, 40), "q_lens": (3000, 1, 100, 3, 60)},
        ],
        ids=["decode", "speculative", "mixed"],
    )
    def test_agrees_with_the_reference(self, form, widths, layout, page_size) -> None:
        model = AttentionModel("wide", 8, 2, *widths)
        inputs = paged_attention_inputs(model, page_size=page_size, kv_layout=layout, device="cuda", **form)
        arguments = with_finite_ends(inputs)
        for more in ({"causal": True}, {"causal": False}, {"causal": True, "window": (100, 0)}):
            pages_agree(arguments | more)

    def test_pages_of_nobody_and_entries_behind_a_sequence_may_be_anything(self) -> None:
        inputs = paged_attention_inputs(GROUPED, seq_lens=(300, 7, 1030), spare_pages=40, device="cuda")
        arguments = with_finite_ends(inputs)
        want = pages_agree(arguments)
        table, lengths = arguments["block_table"], arguments["seq_lens"]
        behind = torch.arange(table.shape[1], device="cuda") >= ((lengths + 15) // 16)[:, None]
        for rubbish in (-1, 1 << 30):
            assert torch.equal(pages_agree(arguments | {"block_table": table.masked_fill(behind, rubbish)}), want)

    def test_a_cache_of_more_than_2_to_the_31_elements(self) -> None:
        page, pages = 64 * 2 * 128, (1 << 31) // (64 * 2 * 128) + 8
        if torch.cuda.mem_get_info()[0] < 3 * 2 * pages * page:
            pytest.skip("needs 13 GB of GPU memory")
        arguments = with_finite_ends(paged_attention_inputs(GROUPED, seq_lens=(200, 64), page_size=64, device="cuda"))
        want = pages_agree(arguments)
        first = pages - arguments["k_cache"].shape[0]
        for name in ("k_cache", "v_cache"):
            large = torch.zeros(pages, 64, 2, 128, dtype=torch.bfloat16, device="cuda")
            large[first:] = arguments[name]
            arguments[name] = large
        table = arguments["block_table"]
        arguments["block_table"] = torch.where(table < 0, table, table + first)
        out = kernelhub.paged_attention(**arguments, backend=PAGED)
        assert (out - want).abs().max() < 0.02, "pages behind 2^31 elements are not found"

    def test_no_call_waits_for_the_gpu(self) -> None:
        inputs = paged_attention_inputs(GROUPED, seq_lens=(300, 77), q_lens=(100, 7), device="cuda")
        arguments = with_finite_ends(inputs)
        try:
            for _ in range(3):
                kernelhub.paged_attention(**arguments, backend=PAGED)
                torch.cuda.set_sync_debug_mode("error")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        pages_agree(arguments)

    @pytest.mark.parametrize("form", [{}, {"q_lens": 20}], ids=["decode", "prefill"])
    def test_the_known_defect_is_still_there(self, form) -> None:
        """NaN in the unused end of a page. Fails where it is gone, which is when its entry can go."""
        arguments = paged_attention_inputs(GROUPED, seq_lens=(300, 77, 64), page_size=64, device="cuda", **form)
        want = pages_agree(with_finite_ends(arguments))
        out = kernelhub.paged_attention(**arguments, backend=PAGED)
        assert torch.equal(out[2], want[2]), "a sequence that ends with its page"
        here = f"cuDNN {torch.backends.cudnn.version()} on {torch.cuda.get_device_name()}"
        if torch.equal(out, want):
            pytest.fail(f"NaN in the ends of pages does not matter to {here}: narrow {PAGED}'s entry in KNOWN_BAD")
        assert out[:2].isnan().any(), f"{here} gives other numbers, though no NaN"
