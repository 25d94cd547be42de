"""``kernelhub warmup``: what a model needs is made ready here, or listed for a device that is not here."""

from __future__ import annotations

import json

import pytest
import torch

MODEL = ("--model", "llama-3.1-8b", "--tp", "8", "--tokens", "1,8")


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path / "caches"))


class TestHere:
    def test_everything_is_reported_with_its_kernel_and_a_summary(self, ask):
        answer = ask("warmup", *MODEL, "--device", "cpu", "--no-verify")
        assert answer.code == 0
        assert any(name in answer.out for name in ("torch.packed", "cpp."))  # the latter on a CPU with AVX-512
        assert "nothing to compile" in answer.out
        assert "15 items on" in answer.out
        assert "making ready 14/15" in answer.err

    def test_a_second_one_says_how_much_it_took_over(self, ask):
        ask("warmup", *MODEL, "--device", "cpu", "--no-verify")
        assert "15 of them were ready on disk before" in ask("warmup", *MODEL, "--device", "cpu", "--no-verify").out

    def test_as_json_it_is_nothing_else(self, ask):
        told = ask("warmup", *MODEL, "--device", "cpu", "--no-verify", "--phase", "decode", "--json").json
        assert told["ok"]
        assert [item["op"] for item in told["items"]] == ["paged_attention"]
        assert told["verified"] == []

    def test_the_chosen_kernels_are_verified_unless_said_otherwise(self, ask):
        answer = ask("warmup", *MODEL, "--device", "cpu", "--phase", "decode")
        assert answer.code == 0
        assert "1 kernels verified, 0 of them quarantined" in answer.out

    def test_what_fails_gives_1(self, ask, monkeypatch):
        monkeypatch.setenv("KERNELHUB_DISABLE", "torch,triton,cpp")
        answer = ask("warmup", *MODEL, "--device", "cpu", "--no-verify", "--phase", "decode")
        assert answer.code == 1
        assert "no registered kernel can run this" in answer.out


class TestElsewhere:
    def test_a_list_is_for_any_device_and_runs_nothing(self, ask):
        answer = ask("warmup", "--model", "deepseek-v3.2", "--tp", "8", "--device", "H200", "--list")
        assert (answer.code, answer.err) == (0, "")
        for word in ("mla_attention", "fused_moe", "1 to 8192 (136)", "kernels,", "calls"):
            assert word in answer.out

    def test_a_list_is_for_any_machine(self, ask):
        words = ("--with", "torch=2.13.0", "--with", "triton=3.7.1", "--list", "--json")
        told = json.loads(ask("warmup", *MODEL, "--device", "H200", *words).out)
        assert {item["kernel"].split(".")[0] for item in told["items"]} == {"gluon", "triton"}

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: 1 case")
    def test_without_a_list_the_device_has_to_be_here(self, ask):
        answer = ask("warmup", *MODEL, "--device", "H200")
        assert answer.code == 2
        assert "this machine has no GPU, not H200" in answer.err
        assert "--list" in answer.err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--model", "lama"), "did you mean llama-3.1-8b"),
            (("--model", "llama-3.1-8b", "--tokens", "x"), "'x' is not a list of token counts"),
            (("--model", "llama-3.1-8b", "--tokens", "0", "--list"), "'0' is not a list of token counts"),
            (("--model", "llama-3.1-8b", "--with", "torch=2.13.0"), "add --list to print what it would need"),
            ((), "the following arguments are required: --model"),
        ],
    )
    def test_wrong_questions_are_reported(self, ask, words, message):
        answer = ask("warmup", *words)
        assert answer.code == 2
        assert message in answer.err
