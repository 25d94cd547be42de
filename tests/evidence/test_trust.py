"""A kernel that nobody verified on a family of devices is chosen once it was verified here, for that class alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import ConfigurationError
from kernelhub.evidence import trust
from kernelhub.evidence.serving import serving_calls
from kernelhub.ops.attention.cases import AttentionCases
from kernelhub.ops.models.calls import need_of
from kernelhub.ops.models.problems import problems_of
from kernelhub.probes.device import facts
from kernelhub.runtime.progress import Heart
from kernelhub.warming.trusting import Trusting
from kernelhub.warming.wanted import items_of
from tests.evidence import fake_vendor
from tests.evidence.fake_vendor import ACTS

CLASS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim_qk": 32, "head_dim_vo": 32, "q_len": "many", "causal": True}
QUICK = {"token_counts": [17, 19, 24], "device": "cpu"}
PORTABLE = ("torch.", "cpp.")  # the latter on a CPU with AVX-512


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install kernels of the vendor's library; they are verified in this process unless they have to be apart."""
    site = tmp_path / "site"

    def installed(*names: str, apart: bool = False) -> None:
        fake_vendor.install(site, names)
        monkeypatch.syspath_prepend(str(site))
        kernelhub.reload()
        if not apart:
            for module in ("evidence.earn", "warming.trusting"):
                monkeypatch.setattr(f"kernelhub.{module}.goes_apart", lambda kernel: False)

    monkeypatch.setenv("KERNELHUB_VERIFY_TIMEOUT_S", "20")
    yield installed
    fake_vendor.uninstall(site)
    trust.forget_unwritten()


def chosen(**changes: Any) -> str | None:
    return kernelhub.explain("attention", device="cpu", **{**CLASS, **changes}).selected


def chosen_anew() -> str | None:
    kernelhub.reload()
    return chosen()


def verify(name: str, **changes: Any) -> Any:
    facets = {**CLASS, **changes}
    return kernelhub.verify("attention", backend=f"vendor.{name}", facets=facets, **QUICK)


class TestTrustHere:
    def test_what_nobody_verified_is_not_chosen_and_the_command_that_changes_it_is_named(self, install) -> None:
        install("g_right")
        selection = kernelhub.explain("attention", device="cpu", **CLASS)
        assert selection.selected.startswith(PORTABLE)
        (faster,) = selection.faster
        assert (faster.kernel, faster.code) == ("vendor.g_right", "untrusted")
        assert "published: 2.1x of torch.sdpa" in faster.hint
        command = "kernelhub verify attention --backend vendor.g_right --causal --head-dim-qk 32 --head-dim-vo 32"
        assert faster.remedy == f"{command} --num-kv-heads 2 --num-q-heads 4 (about 9 s)"
        assert "would be first; untested on" in str(selection)

    def test_it_is_chosen_once_it_was_verified(self, install) -> None:
        install("g_right")
        found = verify("g_right")
        assert found.ok
        assert found.results[0].checks
        assert chosen() == "vendor.g_right"
        kernelhub.reload()  # as a later process would, from what is on disk
        assert chosen() == "vendor.g_right"

    @pytest.mark.parametrize(
        "other",
        [
            {"num_q_heads": 8},
            {"head_dim_qk": 64, "head_dim_vo": 64},
            {"q_len": "one"},
            {"causal": False},
            {"softcap": True},
            {"lse": True},
            {"q_dtype": "float16", "kv_dtype": "float16"},
        ],
        ids=str,
    )
    def test_a_class_that_differs_in_one_facet_is_not_covered(self, install, other) -> None:
        install("g_right")
        verify("g_right")
        assert chosen(**other) != "vendor.g_right"

    def test_without_the_evidence_the_former_kernel_is_selected(self, install, cache: Path) -> None:
        install("g_right")
        before = chosen()
        verify("g_right")
        assert chosen() != before
        for path in cache.rglob("*.json"):
            path.unlink()
        HUB.forget_evidence()
        assert chosen() == before

    def test_another_driver_library_or_record_makes_it_a_miss_with_the_reason(self, install, cache, caplog) -> None:
        install("g_right")
        verify("g_right")
        (path,) = cache.glob("trust/*/*/*.json")
        document = json.loads(path.read_text())
        document["document"]["key"]["record and source"] = "another"
        path.write_text(json.dumps(document))
        HUB.forget_evidence()
        assert chosen() != "vendor.g_right"

    def test_a_request_needs_no_evidence(self, install) -> None:
        install("g_right")
        with kernelhub.use(attention="vendor"):
            assert chosen() == "vendor.g_right"
        with kernelhub.use(prefer="vendor.g_right"):
            assert chosen() == "vendor.g_right"


class TestPolicies:
    def test_a_vendor_s_word_suffices_where_the_user_says_so(self, install, monkeypatch) -> None:
        install("g_right")
        with kernelhub.use(trust="vendor"):
            assert chosen() == "vendor.g_right"
        kernelhub.configure(trust="vendor")
        assert chosen() == "vendor.g_right"
        kernelhub.configure()
        monkeypatch.setenv("KERNELHUB_TRUST", "vendor")
        kernelhub.reload()
        assert chosen() == "vendor.g_right"

    def test_measured_takes_no_evidence_of_this_machine(self, install) -> None:
        install("g_right")
        verify("g_right")
        with kernelhub.use(trust="measured"):
            assert chosen().startswith(PORTABLE)

    def test_a_config_file_says_it_too(self, install, monkeypatch, tmp_path) -> None:
        install("g_right")
        path = tmp_path / "kernelhub.toml"
        path.write_text('trust = "vendor"\n')
        monkeypatch.setenv("KERNELHUB_CONFIG", str(path))
        kernelhub.reload()
        assert chosen() == "vendor.g_right"
        path.write_text('trust = "all"\n')
        with pytest.raises(ConfigurationError, match="here, vendor, measured"):
            chosen_anew()
        monkeypatch.delenv("KERNELHUB_CONFIG")

    def test_a_misspelt_word_names_the_right_ones(self, monkeypatch) -> None:
        with pytest.raises(ConfigurationError, match="did you mean vendor"):
            kernelhub.use(trust="vender")
        monkeypatch.setenv("KERNELHUB_TRUST", "vender")
        with pytest.raises(ConfigurationError, match="here, vendor or measured"):
            chosen_anew()


class TestWrongKernels:
    @pytest.mark.parametrize(
        ("name", "code"),
        [
            ("a_dies", "crashed"),
            ("c_loses_the_device", "raised"),
            ("d_wrong", "wrong_numbers"),
            ("e_wrong_beyond_20_tokens", "wrong_numbers"),
        ],
    )
    def test_is_quarantined_and_not_selected_even_if_the_vendor_is_trusted(self, install, name, code) -> None:
        install(name, apart=name == "a_dies")
        found = verify(name)
        assert [result.code for result in found.results] == [code]
        with kernelhub.use(trust="vendor"):
            selection = kernelhub.explain("attention", device="cpu", **CLASS)
        assert selection.selected.startswith(PORTABLE)
        decision = next(item for item in selection.decisions if item.kernel == f"vendor.{name}")
        assert decision.code == "quarantined"
        assert "--num-q-heads 4" in decision.remedy

    def test_what_shows_after_other_calls_is_found(self, install) -> None:
        install("f_wrong_after_other_calls")
        assert not verify("f_wrong_after_other_calls").ok

    def test_quarantine_takes_the_trust_of_every_class(self, install) -> None:
        install("e_wrong_beyond_20_tokens")
        few = {**QUICK, "token_counts": [17, 18]}
        kernelhub.verify("attention", backend="vendor", facets=CLASS, **few)
        assert chosen() == "vendor.e_wrong_beyond_20_tokens"
        verify("e_wrong_beyond_20_tokens", num_q_heads=8)
        assert chosen().startswith(PORTABLE)
        assert not trust.covered(facts_of_cpu())[("attention", "vendor.e_wrong_beyond_20_tokens")]

    def test_the_op_s_own_cases_do_not_lift_what_was_wrong_at_a_model_s_sizes(self, install) -> None:
        install("f_wrong_beyond_140_tokens")
        kernelhub.verify("attention", backend="vendor", facets=CLASS, token_counts=[17, 150], device="cpu")
        HUB.forget_evidence()
        found = kernelhub.verify("attention", backend="vendor", device="cpu", quick=True, budget_s=1.0, apart=False)
        assert [check.case[:7] for check in found.results[0].failures] == ["serving"]

    def test_a_hang_costs_its_time_limit_and_no_more(self, install, monkeypatch) -> None:
        monkeypatch.setenv("KERNELHUB_VERIFY_TIMEOUT_S", "3")
        install("b_hangs", apart=True)
        assert [result.code for result in verify("b_hangs").results] == ["hung"]


class TestWarmUp:
    def test_verifies_what_would_be_first_until_one_is_right(self, install) -> None:
        install("a_dies", "d_wrong", "g_right", "h_right_too", apart=True)
        need = need_of("attention", kernelhub.explain("attention", device="cpu", **CLASS).problem)
        done = kernelhub.warmup([need], token_counts=[17, 24], device="cpu")
        assert [(item.kernel, item.ok) for item in done.earned] == [
            ("vendor.a_dies", False),
            ("vendor.d_wrong", False),
            ("vendor.g_right", True),
        ]
        assert chosen() == "vendor.g_right"
        assert {item.kernel for item in done.items} == {"vendor.g_right"}
        assert "1 of 3 kernels that would be first are right" in str(done)
        again = kernelhub.warmup([need], token_counts=[17, 24], device="cpu")
        assert again.earned == ()

    def test_says_what_it_had_no_time_for(self, install) -> None:
        install("g_right")
        need = need_of("attention", kernelhub.explain("attention", device="cpu", **CLASS).problem)
        done = kernelhub.warmup([need], token_counts=[17], device="cpu", verify_budget_s=1e-9)
        assert done.earned == ()
        assert any("vendor.g_right would be first" in note for note in done.notes)
        assert done.ok

    def test_reports_which_kernel_is_verified_and_what_is_left_of_the_budget(self, install, caplog) -> None:
        install("d_wrong", "g_right")
        need = need_of("attention", kernelhub.explain("attention", device="cpu", **CLASS).problem)
        beats: list[Any] = []
        with caplog.at_level("INFO", logger="kernelhub.evidence"):
            done = kernelhub.warmup([need], token_counts=[17], device="cpu", verify_budget_s=300, progress=beats.append)
        lines = [str(beat) for beat in beats if beat.stage == "earning trust"]
        labels = ("vendor.d_wrong: as requested", "vendor.g_right: as requested")
        firsts = [next(line for line in lines if label in line) for label in labels]
        assert all(line.startswith(f"earning trust {place}/") for place, line in enumerate(firsts))
        assert all("s of the budget left: attention vendor." in line for line in firsts)
        assert all(0 < beat.budget_left_s <= 300 for beat in beats if beat.stage == "earning trust")
        assert "attention vendor.g_right: verified, and selected now" in caplog.text
        stages = dict(done.stages)
        assert set(stages) == {"waiting", "earning trust", "making ready"}  # and not verified a second time
        assert sum(stages.values()) <= done.seconds + 0.1
        assert "earning trust" in done.summary()

    def test_several_processes_share_the_classes_out_and_come_to_the_same_answer(self, install) -> None:
        install("d_wrong", "i_slow", apart=True)
        heads, told = (2, 4), Trusting()
        told.settle(items_of_heads(heads), torch.device("cpu"), Heart(None, None), 300.0, 64, jobs=2)
        assert [item.kernel for item in told.earnings if item.ok] == ["vendor.i_slow"] * 2
        assert [chosen(num_q_heads=number) for number in heads] == ["vendor.i_slow"] * 2
        assert codes()["vendor.d_wrong"] == "quarantined"
        assert chosen_anew() == "vendor.i_slow"

    def test_what_progress_raises_while_several_verify_is_raised_and_quarantines_nothing(self, install) -> None:
        install("g_right", "h_right_too")

        def stops(beat: Any) -> None:
            if beat.done == 1:
                raise KeyError("stop")

        items, heart = items_of_heads((2, 4, 8)), Heart(None, stops)
        with pytest.raises(KeyError, match="stop"):
            Trusting().settle(items, torch.device("cpu"), heart, 300.0, 64, jobs=2)
        assert "quarantined" not in codes().values()

    def test_earns_nothing_where_nothing_is_verified(self, install) -> None:
        install("g_right")
        need = need_of("attention", kernelhub.explain("attention", device="cpu", **CLASS).problem)
        assert kernelhub.warmup([need], token_counts=[17], device="cpu", verify=False).earned == ()
        assert chosen().startswith(PORTABLE)


class TestTune:
    def test_verifies_before_it_measures(self, install) -> None:
        install("d_wrong", "g_right", apart=True)
        need = need_of("attention", kernelhub.explain("attention", device="cpu", **CLASS).problem)
        found = kernelhub.tune([need], token_counts=[17], device="cpu", backend=["vendor", "torch.blocked"], samples=3)
        assert set(found.entries[0].ranking) == {"vendor.g_right", "torch.blocked"}
        assert "wrong" in found.wrong["attention", "vendor.d_wrong"]


class TestWhatIsAsked:
    def test_many_kinds_of_call_share_a_dozen_sizes_and_each_has_its_least_and_its_most(self) -> None:
        (need,) = [need for need in problems_of("llama-3.1-8b", phases=["decode"]) if need.op == "paged_attention"]
        counts = list(range(1, 200))
        for kinds, most in ((1, 7), (2, 14), (4, 16), (6, 18)):
            several = replace(need, sizes=tuple((("queries", number),) for number in range(kinds)))
            calls = serving_calls(several, counts, 64)
            assert len(calls) <= most
            for kind in several.sizes:
                mine = [call.tokens for call in calls if call.need.sizes == (kind,)]
                assert {1, 199} <= set(mine)
                assert mine[-1] == 1

    def test_what_has_no_room_beside_the_kernel_says_nothing_against_it(self, install, monkeypatch) -> None:
        install("g_right")

        def no_room(self: Any, arguments: Any) -> Any:
            if arguments["q"].shape[-3] > 20:
                raise torch.OutOfMemoryError("the reference needs 200 GB")
            return expect(self, arguments)

        expect = AttentionCases.expect
        monkeypatch.setattr(AttentionCases, "expect", no_room)
        found = verify("g_right")
        assert found.ok
        assert found.results[0].left_out == 1
        assert chosen() == "vendor.g_right"


class TestTheRequestPath:
    def test_a_call_reads_evidence_and_makes_none(self, install, cache: Path) -> None:
        install("g_right")
        q = torch.randn(1, 17, 4, 32, dtype=torch.bfloat16)
        kernelhub.attention(q, q[:, :, :2], q[:, :, :2], causal=True)
        found = [path for path in cache.rglob("*.json") if path.name != "manifest.json"]  # that of a compiled kernel
        assert not found
        assert [row.kernel.partition(".")[0] for row in kernelhub.report().rows] in (["torch"], ["cpp"])


def codes() -> dict[str, str]:
    return {item.kernel: item.code for item in kernelhub.explain("attention", device="cpu", **CLASS).decisions}


def items_of_heads(heads: tuple[int, ...]) -> list[Any]:
    selections = [kernelhub.explain("attention", device="cpu", **{**CLASS, "num_q_heads": number}) for number in heads]
    return items_of(selections, [17, 18], {}, on_gpu=False)


def facts_of_cpu() -> Any:
    return facts(torch.device("cpu"))


def test_every_act_is_tried() -> None:
    source = Path(__file__).read_text()
    assert all(f'"{name}"' in source for name in ACTS)
