"""Real runs on the CPU: the fast kernel is selected, the slow one is not, a wrong one is never selected."""

from __future__ import annotations

import json
import time
from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.backends.torch.attention.packed import Packed
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import ConfigurationError
from kernelhub.evidence.tuning.entry import TuningEntry
from kernelhub.ops.models.calls import need_of
from tests.dispatch.backends import record, register

HERE = __name__
FACETS: dict[str, Any] = {
    "q_dtype": "float32",
    "kv_dtype": "float32",
    "head_dim_qk": 16,
    "head_dim_vo": 16,
    "num_q_heads": 2,
    "num_kv_heads": 1,
    "q_len": "many",
    "ragged": True,
    "causal": True,
}


class Right(Packed):
    """Attention that is right, after a while."""

    seconds: ClassVar[float] = 0.0
    launches: ClassVar[int] = 0

    def launch(self, *arguments: Any) -> None:
        type(self).launches += 1
        super().launch(*arguments)
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            pass


class Slow(Right):
    seconds = 0.003


class Quick(Right):
    """Right, and at once."""


class Lies(Packed):
    """The fastest of all: it computes nothing."""

    def launch(self, q: Any, k: Any, v: Any, step: Any, values: Any, out: Any, lse: Any) -> None:
        out.zero_()


class LiesForMany(Packed):
    """Right for few tokens."""

    def launch(self, q: Any, k: Any, v: Any, step: Any, values: Any, out: Any, lse: Any) -> None:
        if q.shape[0] > 8:
            out.zero_()
        else:
            super().launch(q, k, v, step, values, out, lse)


class Raises(Packed):
    def launch(self, *arguments: Any) -> None:
        raise RuntimeError("no such instruction")


class NoMemory(Packed):
    def launch(self, *arguments: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")


class Interrupts(Packed):
    """Ctrl-C, at the second size."""

    def launch(self, q: Any, *arguments: Any) -> None:
        if q.shape[0] > 8:
            raise KeyboardInterrupt
        super().launch(q, *arguments)


def plugin(name: str, kernel: type) -> None:
    """A plugin's kernel, which its band ranks before all of ours."""
    register(name, record(f"{name}.k", f"{HERE}:{kernel.__name__}"))


@pytest.fixture(autouse=True)
def without_the_interpreter(monkeypatch) -> None:
    """A kernel that Triton interprets takes 100 times as long as it would run, and is timed in every test."""
    monkeypatch.setenv("KERNELHUB_DISABLE", "triton")


@pytest.fixture
def need() -> Any:
    return need_of("attention", kernelhub.explain("attention", device="cpu", **FACETS).problem)


def tuned(need: Any, **more: Any) -> Any:
    usual = {"device": "cpu", "token_counts": [5], "samples": 5, "configurations": False}
    return kernelhub.tune(need, **(usual | more))


def selection() -> Any:
    return kernelhub.explain("attention", device="cpu", **FACETS)


def packed_call(tokens: int = 5) -> Any:
    """A call of that problem."""
    torch.manual_seed(0)
    q, k, v = torch.randn(tokens, 2, 16), torch.randn(tokens, 1, 16), torch.randn(tokens, 1, 16)
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    return kernelhub.attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True, max_seqlen_q=max(17, tokens))


class TestTheFastestWins:
    def test_a_slow_kernel_that_the_order_prefers_loses_and_the_fast_one_is_chosen(self, need) -> None:
        plugin("slow", Slow)
        assert selection().selected == "slow.k"
        found = tuned(need)
        (entry,) = found.entries
        assert entry.order[0] == "slow.k"
        assert entry.chosen != "slow.k"
        assert entry.word == "faster"
        assert entry.ranking.index("slow.k") > 0
        now = selection()
        assert (now.selected, now.source) == (entry.chosen, "tuned")
        assert f"measured {entry.date[:10]}: {entry.chosen} " in now.because
        assert " us for 5 tokens, next " in now.because
        assert "faster than the order's first kernel" in now.because
        assert now.decisions[0].reason == now.because, "explain tells the figures"
        HUB.forget_report()
        packed_call()
        assert kernelhub.report().rows[-1].kernel == entry.chosen
        assert kernelhub.report().rows[-1].source == "tuned"

    def test_it_is_read_again_after_a_reload_and_never_measured_in_a_call(self, need) -> None:
        plugin("slow", Slow)
        chosen = tuned(need).entries[0].chosen
        kernelhub.reload()
        Slow.launches = 0
        for _ in range(3):
            packed_call()
        assert selection().selected == chosen
        assert Slow.launches == 0

    def test_of_two_plugins_the_fast_one_wins(self, need) -> None:
        plugin("a_slow", Slow)
        plugin("quick", Quick)
        assert selection().selected == "a_slow.k"
        found = tuned(need, backend=("a_slow", "quick"))
        assert found.entries[0].ranking == ("quick.k", "a_slow.k")
        now = selection()
        assert (now.selected, now.source) == ("quick.k", "tuned")
        assert [item.kernel for item in now.decisions[:2]] == ["quick.k", "a_slow.k"]
        assert now.decisions[2].accepted, "what was not measured ranks behind"

    def test_what_users_say_is_stronger(self, need, monkeypatch) -> None:
        plugin("slow", Slow)
        tuned(need)
        with kernelhub.use(prefer={"attention": "slow"}):
            assert (selection().selected, selection().source) == ("slow.k", "context")
        with kernelhub.use(attention="slow"):
            assert selection().explicit
            assert selection().selected == "slow.k"
        monkeypatch.setenv("KERNELHUB_PREFER", "slow")
        kernelhub.reload()
        plugin_again = selection()
        assert (plugin_again.selected, plugin_again.source) == ("slow.k", "environment")

    def test_where_the_chosen_one_is_disabled_the_next_measured_one_is_taken(self, need) -> None:
        plugin("slow", Slow)
        (entry,) = tuned(need).entries
        with kernelhub.use(disable=entry.chosen):
            now = selection()
        assert (now.selected, now.source) == (entry.ranking[1], "tuned")

    def test_another_problem_is_chosen_as_before(self, need) -> None:
        plugin("slow", Slow)
        tuned(need)
        other = kernelhub.explain("attention", device="cpu", **FACETS | {"head_dim_qk": 32, "head_dim_vo": 32})
        assert (other.selected, other.source) == ("slow.k", "band")

    def test_a_described_device_contains_nothing_of_it(self, need) -> None:
        tuned(need)
        assert kernelhub.explain("attention", device="H200", **FACETS).source != "tuned"

    def test_plans_and_selections_can_be_tuned_too(self) -> None:
        q = torch.randn(1, 32, 2, 16)
        plan = kernelhub.attention.prepare(q, q, q, causal=True)
        found = tuned([plan, plan.selection], token_counts=[32])
        assert len(found.entries) == 1
        assert dict(found.entries[0].facets)["ragged"] is False

    def test_measuring_is_neither_reported_nor_agreed_on(self, need) -> None:
        packed_call()
        tuned(need)
        rows = kernelhub.report().rows
        assert [row.calls for row in rows] == [1]
        assert {choice.op for choice in kernelhub.agree().choices} == {"attention"}


class TestWhoIsWrong:
    def test_a_kernel_that_is_wrong_is_never_selected_however_fast(self, need) -> None:
        plugin("liar", Lies)
        assert selection().selected == "liar.k"
        found = tuned(need)
        assert not found.ok
        assert "it gave nothing but zeros" in found.wrong["attention", "liar.k"]
        assert "liar.k" not in found.entries[0].ranking
        assert "wrong: attention liar.k: wrong: " in str(found)
        assert selection().selected != "liar.k", "what was measured and right comes first"

    def test_one_that_is_wrong_for_some_sizes_is_selected_for_none(self, need) -> None:
        plugin("liar", LiesForMany)
        found = tuned(need, token_counts=[5, 40])
        (entry,) = found.entries
        assert "liar.k" not in entry.ranking
        small = entry.sizes[0]
        assert "liar.k" not in small.times
        assert small.out["liar.k"].startswith("at another size wrong: ")

    def test_one_that_raises_is_reported_and_left_out(self, need) -> None:
        plugin("raises", Raises)
        found = tuned(need)
        assert "it raised an error: RuntimeError: no such instruction" in found.wrong["attention", "raises.k"]

    def test_quarantined_kernels_are_not_even_asked(self, need) -> None:
        plugin("liar", Lies)
        assert not kernelhub.verify("attention", backend="liar", device="cpu", quick=True).ok
        found = tuned(need)
        assert found.ok
        assert "liar.k" not in found.entries[0].order


class TestLimits:
    def test_no_memory_for_a_kernel_is_reported_and_the_rest_goes_on(self, need) -> None:
        plugin("large", NoMemory)
        found = tuned(need)
        assert [item.why for item in found.left_out] == ["out of memory: tried to allocate 80 GiB"]
        assert found.left_out[0].what == "attention, 5 tokens: large.k"
        assert found.entries
        assert found.ok

    def test_no_memory_for_a_call_is_reported(self, need) -> None:
        found = tuned(need, memory_bytes=1000)
        assert not found.entries
        assert not found.ok
        assert "may be used on cpu; give memory_bytes" in found.left_out[0].why

    def test_no_time_left_keeps_what_was_measured(self, need) -> None:
        plugin("slow", Slow)
        found = tuned(need, token_counts=[5, 6, 7], budget_s=1e-9)
        assert [item.why for item in found.left_out] == ["no time left of budget_s"]
        assert not found.entries

    def test_an_interrupt_keeps_what_was_measured(self, need) -> None:
        other = need_of("attention", kernelhub.explain("attention", device="cpu", **FACETS | {"softcap": True}).problem)
        plugin("interrupts", Interrupts)
        with pytest.raises(KeyboardInterrupt):
            tuned([other, need], token_counts=[5, 40])
        assert selection().source != "tuned"
        first = kernelhub.explain("attention", device="cpu", **FACETS | {"softcap": True})
        assert first.source == "tuned"
        assert "5 tokens" in first.because

    def test_a_class_without_such_calls_says_so(self, need) -> None:
        paged = kernelhub.problems_of("llama-3.1-8b", phases=["decode"])
        assert tuned(paged, token_counts=[1], backend="flashinfer").left_out[0].why.startswith("no requested kernel")

    def test_sealed_it_refuses(self, need) -> None:
        with kernelhub.seal(), pytest.raises(ConfigurationError, match=r"tune before seal\(\), or unseal\(\)"):
            tuned(need)

    def test_forced_it_refuses(self, need, monkeypatch) -> None:
        monkeypatch.setenv("KERNELHUB_FORCE", "attention=torch")
        kernelhub.reload()
        with pytest.raises(ConfigurationError, match="KERNELHUB_FORCE=attention=torch forces one kernel"):
            tuned(need)

    def test_after_an_agreement_it_refuses(self, need) -> None:
        kernelhub.agree(what=need, device="cpu")
        with pytest.raises(ConfigurationError, match="agree again"):
            tuned(need)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"token_counts": [0]}, "token_counts contains 0"),
            ({"token_counts": []}, "token_counts is empty"),
            ({"samples": 0}, "samples is 0"),
            ({"budget_s": -1}, "budget_s is -1"),
            ({"device": "cuda:99"}, "there is no cuda:99 here"),
            ({"backend": "no_such"}, "no_such"),
            ({"ops": ["atention"]}, "did you mean attention"),
        ],
    )
    def test_wrong_arguments_are_reported(self, need, arguments, message) -> None:
        with pytest.raises(ConfigurationError, match=message):
            tuned(need, **arguments)

    def test_neither_model_nor_need(self) -> None:
        with pytest.raises(ConfigurationError, match="3 is not a plan, a selection of explain or a need"):
            kernelhub.tune([3])
        with pytest.raises(ConfigurationError, match=r"did you mean llama-3\.1-8b"):
            kernelhub.tune("lama-3.1-8b")


class TestTheReport:
    def test_regret_is_reported_for_the_selection_and_for_the_order(self, need) -> None:
        plugin("slow", Slow)
        found = tuned(need, token_counts=[5, 40])
        for row in found.regret:
            assert row.order == "slow.k"
            assert row.order_regret.us > 2_000, "the slow kernel takes 3 ms longer"
            assert row.order_regret.percent > 100
            assert row.chosen_regret.percent < row.order_regret.percent
            assert row.best_us > 0
        plain = json.loads(json.dumps(found.to_dict()))
        assert plain["regret"][0]["order_regret"]["us"] > 2_000
        assert plain["entries"][0]["ranking"] == list(found.entries[0].ranking)
        assert "another kernel than the order's is faster for 1" in found.summary()
        assert "slow.k" in str(found)

    def test_times_have_noise_and_samples(self, need) -> None:
        (entry,) = tuned(need, samples=7).entries
        for measured in entry.sizes[0].times.values():
            assert measured.how == "clock"
            assert 5 <= measured.samples <= 7
            assert measured.us > 0
            assert measured.noise_us >= 0

    def test_an_entry_survives_json(self, need) -> None:
        (entry,) = tuned(need).entries
        again = TuningEntry.from_dict(json.loads(json.dumps(entry.to_dict())))
        assert again.to_dict() == entry.to_dict()
        assert again.tuned().kernels == entry.ranking

    def test_progress_is_reported(self, need) -> None:
        seen: list[Any] = []
        tuned(need, progress=lambda *what: seen.append(what))
        assert seen == [("attention", 0, 1)]

    def test_switched_off_it_measures_and_says_that_nobody_heeds_it(self, need, monkeypatch) -> None:
        monkeypatch.setenv("KERNELHUB_EVIDENCE", "0")
        kernelhub.reload()
        found = tuned(need)
        assert "KERNELHUB_EVIDENCE=0" in found.unheeded
        assert selection().source != "tuned"
        monkeypatch.delenv("KERNELHUB_EVIDENCE")
        kernelhub.reload()
        assert selection().source == "tuned"
