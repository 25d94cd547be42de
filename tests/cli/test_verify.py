"""``kernelhub verify``: what it prints, its exit codes, and what `doctor` and `explain` say afterwards."""

from __future__ import annotations

import sys

import pytest

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.evidence import quarantine, store
from tests.dispatch.test_registry import install
from tests.evidence import liars


@pytest.fixture(autouse=True)
def nothing_kept():
    yield
    store.forget_unwritten()
    quarantine.say.cache_clear()


QUICK = ("--device", "cpu", "--quick")


def test_right_kernels_give_0_a_row_each_and_a_line_of_progress(ask):
    answer = ask("verify", "merge_attention_states", "--backend", "torch", *QUICK)
    assert answer.code == 0
    assert answer.row("right").split()[1:3] == ["merge_attention_states", "torch.merge"]
    assert "kernels: 1 right, 0 wrong, 0 not run" in answer.out
    assert "verifying 0/1, 0 s: merge_attention_states torch.merge" in answer.err


def test_a_wrong_kernel_gives_1_and_is_shown_with_its_figures_everywhere(ask):
    liars.attention(liars.ThirtyPercentOff)
    answer = ask("verify", "attention", "--backend", "liar", *QUICK)
    assert answer.code == 1
    assert answer.row("wrong").split()[1:3] == ["attention", "liar.k"]
    assert "attention liar.k is quarantined:" in answer.out
    assert "wrong_numbers: " in answer.out
    assert "largest error" in answer.out
    selection = ask("explain", "attention", "--device", "cpu").row("liar.k")
    assert "quarantined" in selection
    assert "largest error" in selection
    doctor = ask("doctor")
    assert "attention liar.k is quarantined" in doctor.out
    assert "kernelhub verify attention --backend liar.k" in doctor.out
    with liars.mended(liars.ThirtyPercentOff):
        again = ask("verify", "attention", "--backend", "liar", *QUICK)
    assert again.code == 0
    assert "attention liar.k passed and is no longer quarantined" in again.out
    assert "quarantined" not in ask("explain", "attention", "--device", "cpu").out
    assert "1 kernels verified" in ask("doctor").out


def test_json_holds_every_check(ask):
    liars.attention(liars.IgnoresSoftcap)
    answer = ask("verify", "attention", "--backend", "liar,torch.packed", *QUICK, "--json")
    assert answer.code == 1
    found = answer.json
    assert found["ok"] is False
    assert found["counts"] == {"right": 1, "wrong": 1, "not run": 0}
    liar = next(result for result in found["results"] if result["kernel"] == "liar.k")
    assert liar["code"] == "feature_ignored"
    bad = [check for check in liar["checks"] if check["code"] != "ok"]
    assert bad
    assert all("softcap" in check["case"] and "softcap" in check["problem"] for check in bad)


def test_no_kernel_to_ask_gives_1(ask):
    answer = ask("verify", "fp8_gemm", "--backend", "deep_gemm", *QUICK)
    assert answer.code == 1
    assert "`kernelhub backends` says why" in answer.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("atention",), "did you mean attention?"),
        (("--backend", "tritn"), "did you mean triton?"),
        (("--backend", ","), "is empty"),
        (("--device", "cuda:99"), "there is no cuda:99 here"),
        (("--budget-s", "soon"), "'soon' is not a positive number of seconds"),
        (("--quik",), "did you mean --quick?"),
    ],
)
def test_wrong_usage_gives_2_and_says_what_would_be_right(ask, words, message):
    answer = ask("verify", *words)
    assert answer.code == 2
    assert message in answer.err


def test_it_says_whose_code_runs_and_leaves_third_parties_out_where_asked(ask, tmp_path, monkeypatch):
    text = "from kernelhub.dispatch.kernel import Backend\nBACKEND = Backend('acme', 'a plugin')\nKERNELS = ()\n"
    install(tmp_path, "acme", "acme = acme_verified", {"acme_verified.py": text})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("KERNELHUB_PLUGINS", "all")
    for choice in ("yes", "no"):
        sys.modules.pop("acme_verified", None)
        kernelhub.reload()
        answer = ask("verify", "merge_attention_states", "--backend", "torch", f"--plugins={choice}", *QUICK)
        assert "verify imports and runs the code that the kernels' records name" in answer.err
        assert ("also of third parties: acme (acme 1.0)" in answer.err) == (choice == "yes")
    assert "acme" not in HUB.registry.backends
