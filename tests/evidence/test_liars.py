"""Wrong kernels are detected, each with its own code, and are no longer selected; right ones pass."""

from __future__ import annotations

import datetime

import pytest
import torch

import kernelhub
from kernelhub.errors import DeviceLost, NoKernel
from kernelhub.evidence.results import CODES as KNOWN_CODES
from tests.contract.test_liars import WritesBeforeItReads
from tests.evidence import liars


def operands():
    torch.manual_seed(0)
    return torch.randn(1, 4, 4, 64), torch.randn(1, 4, 2, 64), torch.randn(1, 4, 2, 64)


def verified(op: str = "attention", **more):
    return kernelhub.verify(op, **{"backend": "liar", "device": "cpu", "quick": True} | more)


def decision(selection, kernel: str = "liar.k"):
    return next(item for item in selection.decisions if item.kernel == kernel)


@pytest.mark.parametrize(
    "lie",
    [pytest.param(lie, marks=pytest.mark.fault(code)) for lie, code in liars.CODES.items()],
    ids=lambda lie: lie.__name__,
)
class TestOfAttention:
    def test_is_caught_by_its_code_and_the_next_kernel_is_chosen(self, lie) -> None:
        liars.attention(lie)
        q, k, v = operands()
        before = kernelhub.attention.explain(q, k, v)
        assert before.selected == "liar.k"
        kernelhub.attention.prepare(q, k, v)  # a plan that has to be forgotten
        found = verified()
        assert not found.ok
        (result,) = found.results
        assert result.code == liars.CODES[lie]
        assert result.failures[0].figures
        after = kernelhub.attention.explain(q, k, v)
        rejected = decision(after)
        assert (rejected.accepted, rejected.code) == (False, "quarantined")
        assert KNOWN_CODES[result.code] in rejected.reason
        assert result.reason in rejected.reason
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        assert today in rejected.reason
        assert "kernelhub verify attention --backend liar.k" in rejected.remedy
        assert after.selected == before.decisions[1].kernel != "liar.k"
        want = kernelhub.attention.reference(q, k, v)
        torch.testing.assert_close(kernelhub.attention(q, k, v), want, rtol=0, atol=1e-4)


@pytest.fixture
def cpu_as_gpu(monkeypatch) -> None:
    """The CPU stands for a GPU, which can be lost."""
    monkeypatch.setattr("kernelhub.dispatch.lost._can_be_lost", lambda device: True)


@pytest.mark.usefixtures("cpu_as_gpu")
def test_a_kernel_that_loses_the_device_ends_the_run_and_the_process_gets_the_reason() -> None:
    liars.attention(liars.LosesTheDevice)
    found = kernelhub.verify("attention", device="cpu", quick=True)
    by_name = {result.kernel: result for result in found.results}
    assert by_name["liar.k"].code == "raised"
    assert len(by_name["liar.k"].checks) == 1
    later = [result for result in found.results if "restart it" in result.why_not]
    assert later
    assert not any(result.checks for result in later)
    assert not kernelhub.health().ok
    with pytest.raises(DeviceLost, match="illegal memory access"):
        kernelhub.attention(*operands())


class TestOfNoKernel:
    """What is not the kernel's doing does not quarantine it."""

    @pytest.mark.usefixtures("cpu_as_gpu")
    def test_a_device_that_was_lost_before(self) -> None:
        liars.attention(liars.LosesTheDevice)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            kernelhub.attention(*operands())
        with pytest.raises(DeviceLost, match="illegal memory access"):
            kernelhub.verify("attention", device="cpu", quick=True)

    def test_a_process_that_is_sealed_meanwhile(self) -> None:
        liars.attention(liars.SealsTheProcess)
        try:
            (result,) = verified().results
        finally:
            kernelhub.unseal()
        assert not result.failures
        assert "kernelhub is sealed" in result.why_not
        assert kernelhub.attention.explain(*operands()).selected == "liar.k"


class TestQuarantine:
    def test_a_quarantined_kernel_runs_only_if_it_is_forced_past_it(self) -> None:
        liars.attention(liars.ThirtyPercentOff)
        q, k, v = operands()
        verified()
        with pytest.raises(NoKernel, match="quarantined"):
            kernelhub.attention(q, k, v, backend="liar")
        with pytest.raises(NoKernel, match="quarantined"), kernelhub.use(attention="liar"):
            kernelhub.attention(q, k, v)
        with kernelhub.use(unsafe=True):
            assert kernelhub.attention.explain(q, k, v).selected != "liar.k"
            got = kernelhub.attention(q, k, v, backend="liar")
        torch.testing.assert_close(got, 1.3 * kernelhub.attention.reference(q, k, v), rtol=0, atol=1e-4)

    def test_it_outlives_reload_and_a_new_start(self) -> None:
        q, k, v = operands()
        liars.attention(liars.Zeros)
        verified()
        kernelhub.reload()
        assert decision(kernelhub.attention.explain(q, k, v)).code == "quarantined"
        from kernelhub.dispatch.hub import HUB

        HUB.restore()
        liars.attention(liars.Zeros)
        assert decision(kernelhub.attention.explain(q, k, v)).code == "quarantined"

    def test_a_run_that_passes_lifts_it(self) -> None:
        q, k, v = operands()
        liars.attention(liars.IgnoresSoftcap)
        verified(quick=False)
        with liars.mended(liars.IgnoresSoftcap):
            found = verified()
            assert found.ok
            assert found.lifted == (("attention", "liar.k"),)
            assert kernelhub.attention.explain(q, k, v).selected == "liar.k"
            assert kernelhub.attention(q, k, v).shape == q.shape
        assert not verified().ok
        assert decision(kernelhub.attention.explain(q, k, v)).code == "quarantined"

    def test_a_quick_run_repeats_what_failed_before(self) -> None:
        """What only a full run finds is asked again by a quick one, and stands until it passes."""
        liars.attention(liars.WrongForOddTokens)
        full = verified(quick=False)
        failed = {check.case for check in full.results[0].failures}
        quick = verified()
        assert {check.case for check in quick.results[0].failures} == failed

    def test_what_there_was_no_time_for_still_stands(self) -> None:
        liars.attention(liars.Zeros)
        full = verified()
        short = verified(budget_s=1e-9)
        (result,) = short.results
        assert result.left_out
        assert {check.case for check in result.failures} == {check.case for check in full.results[0].failures}
        with liars.mended(liars.Zeros):
            assert not verified(budget_s=1e-9).ok, "one check that passes does not lift it"
            assert verified().ok

    def test_evidence_may_be_ignored(self, monkeypatch) -> None:
        q, k, v = operands()
        liars.attention(liars.Zeros)
        verified()
        monkeypatch.setenv("KERNELHUB_EVIDENCE", "0")
        kernelhub.reload()
        assert kernelhub.attention.explain(q, k, v).selected == "liar.k"
        monkeypatch.delenv("KERNELHUB_EVIDENCE")
        kernelhub.reload()
        assert kernelhub.attention.explain(q, k, v).selected != "liar.k"

    def test_a_kernel_on_another_device_is_not_concerned(self) -> None:
        liars.attention(liars.Zeros)
        verified()
        selection = kernelhub.explain("attention", device="H200")
        assert decision(selection).code != "quarantined"

    def test_a_right_kernel_of_a_plugin_is_left_alone(self) -> None:
        liars.attention(liars.Truth)
        found = verified(quick=False)
        assert found.ok
        assert len(found.results[0].checks) > 60
        q, k, v = operands()
        assert kernelhub.attention.explain(q, k, v).selected == "liar.k"


class TestOfOtherOps:
    @pytest.mark.fault("in_place")
    def test_a_merge_that_writes_before_it_reads(self) -> None:
        liars.other("merge_attention_states", WritesBeforeItReads)
        assert verified("merge_attention_states").results[0].code == "in_place"

    def test_a_scale_of_another_row(self) -> None:
        liars.other("fp8_gemm", liars.ReadsScalesOfTheFirstRow)
        (result,) = verified("fp8_gemm").results
        assert result.code == "wrong_numbers"
        assert all(check.problem.startswith("scaling=") for check in result.failures)

    def test_indices_that_stand_elsewhere(self) -> None:
        liars.other("topk_indices", liars.PlacesOutOfOrder)
        assert verified("topk_indices").results[0].code == "wrong_numbers"

    @pytest.mark.parametrize("lie", [liars.LosesARow, liars.ReadsAsItLies], ids=lambda lie: lie.__name__)
    @pytest.mark.fault("packing")
    def test_packing(self, lie) -> None:
        packs = {"layouts": ("checkpoint", liars.LAYOUT), "packs_to": liars.LAYOUT}
        liars.other("fp4_gemm", lie, **packs)
        assert verified("fp4_gemm").results[0].code == "packing"

    def test_right_packing_is_left_alone(self) -> None:
        packs = {"layouts": ("checkpoint", liars.LAYOUT), "packs_to": liars.LAYOUT}
        liars.other("fp4_gemm", liars.Reversing, **packs)
        assert verified("fp4_gemm").ok

    def test_a_kernel_that_reads_packed_weights_only_is_asked_with_them(self) -> None:
        packs = {"layouts": (liars.LAYOUT,), "packs_to": liars.LAYOUT}
        liars.other("fp4_gemm", liars.Reversing, **packs)
        found = verified("fp4_gemm")
        assert found.ok
        assert len(found.results[0].checks) > 20
        liars_at = [check for check in found.results[0].checks if not check.ok]
        assert liars_at == []
