"""What ``kernelhub warmup`` makes ready where no token counts are given."""

from __future__ import annotations


def tokens(ask, device):
    items = ask("warmup", "--model", "llama-3.1-8b", "--device", device, "--list", "--json").json["items"]
    return {count for item in items for count in item["tokens"]}


def test_a_cpu_warms_what_a_cpu_serves_and_a_gpu_up_to_a_whole_step(ask):
    """With 8192 tokens a call on a CPU takes minutes, and compiles nothing that one of 256 does not."""
    assert max(tokens(ask, "CPU")) == 256
    assert max(tokens(ask, "H200")) == 8192
    assert "on a CPU 1,4,16,64,256" in " ".join(ask("warmup", "--help").out.split())
