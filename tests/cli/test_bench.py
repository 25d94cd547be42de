"""``kernelhub bench``: every supported kernel of one problem timed beside the others."""

from __future__ import annotations

import sys

import pytest

QUICK = ("--tokens", "2,32", "--budget-s", "0.02", "--device", "cpu")
MERGE = ("bench", "merge_attention_states", "--shape", "num_heads=2,head_dim=16", *QUICK)


def test_every_supported_kernel_has_a_time_for_each_number_of_tokens(ask):
    words = ("bench", "attention", "--num-q-heads", "2", "--num-kv-heads", "2", "--shape", "head_dim_qk=16")
    told = ask(*words, "--head-dim-vo", "16", "--tokens", "32", *QUICK[2:], "--json").json
    assert (told["problem"]["head_dim_qk"], told["problem"]["num_q_heads"]) == (16, 2)
    assert {row["kernel"] for row in told["kernels"]} >= {"torch.packed", "torch.blocked"}
    assert all(row["us"]["32"] > 0 for row in told["kernels"])


def test_for_people_times_stand_beside_their_ratio_to_the_fastest(ask):
    answer = ask(*MERGE)
    assert answer.code == 0
    assert answer.row("kernel").split() == ["kernel", "2", "tokens", "32", "tokens"]
    assert answer.row("torch.merge").count("(1.00x)") == 2
    assert "timing 0/2, 0 s" in answer.err


def test_a_facet_that_is_none_is_answered_with_the_nearest(ask):
    answer = ask("bench", "merge_attention_states", "--shape", "num_head=2")
    assert (answer.code, answer.out) == (2, "")
    assert "'num_head=2' is not a FACET=VALUE of merge_attention_states (did you mean num_heads?)" in answer.err


def test_a_misspelt_backend_is_refused_with_the_nearest(ask):
    answer = ask(*MERGE, "--backend", "tritn")
    assert (answer.code, answer.out) == (2, "")
    assert "--backend: 'tritn' is not a backend or kernel (did you mean triton?)" in answer.err


def test_no_kernel_is_exit_1(ask):
    answer = ask(*MERGE, "--backend", "flashinfer")
    assert answer.code == 1
    assert "no kernel can be timed" in answer.out


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(ask, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answer = ask(*MERGE, "--png", str(tmp_path / "times.png"))
    assert (answer.code, answer.out) == (2, "")
    assert "pip install matplotlib" in answer.err


def test_times_are_plotted(ask, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is missing: 1 case")
    assert ask(*MERGE, "--png", str(tmp_path / "times.png")).code == 0
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
    for name in ("times", "times.txt"):  # a PNG of exactly this name
        assert ask(*MERGE, "--png", str(tmp_path / name)).code == 0
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("place", "reason"), [(".", "Is a directory"), ("absent/x.png", "No such file or directory")])
def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_timed(ask, tmp_path, place, reason):
    pytest.importorskip("matplotlib", reason="matplotlib: 2 cases")
    answer = ask(*MERGE, "--png", str(tmp_path / place))
    assert (answer.code, answer.out) == (2, "")
    assert f"--png {tmp_path / place}: {reason}; name a file that can be written" in answer.err
    assert "timing" not in answer.err


def test_tokens_that_the_problem_has_no_call_of_are_refused_with_the_facet(ask):
    answer = ask("bench", "fp8_gemm", "--n", "256", "--k", "256", "--rows", "many", "--tokens", "1", "--device", "cpu")
    assert (answer.code, answer.out) == (2, "")
    assert "has no call with this number of new tokens" in answer.err
    assert "(rows)" in answer.err


def test_a_context_of_no_tokens_is_refused(ask):
    answer = ask("bench", "paged_attention", "--context-len", "0")
    assert (answer.code, answer.out) == (2, "")
    assert "--context-len 0: give a number of tokens, 1 or more" in answer.err
