"""Zero is proved: after `kernelhub.warmup(model)` and `seal()`, no traffic of that model does any work but its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernelhub
from kernelhub.errors import NotWarmed
from tests.warming.traffic import Server

MAX_TOKENS, MAX_LEN = 48, 80
COUNTS = (1, 2, 4, 8, 16, 32, 48)

# Published models, shared out among so many ranks that a CPU can run one rank's part; every layer kind once.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-3.1-8b", {"tp": 8}),
    "llama in fp8 by channel": ("llama-3.1-8b", {"tp": 32, "quantization": "fp8_channel"}),
    "llama in fp8, cache too": ("llama-3.1-8b", {"tp": 32, "quantization": "fp8_tensor", "kv_dtype": "float8_e4m3fn"}),
    "llama in nvfp4": ("llama-3.1-8b", {"tp": 32, "quantization": "nvfp4"}),
    "gemma": ("gemma-2-9b", {"tp": 16}),
    "gpt-oss": ("gpt-oss-120b", {"tp": 32, "ep": 128}),
    "qwen3 in blocks": ("qwen3-30b-a3b", {"tp": 32, "ep": 128, "quantization": "fp8_block"}),
    "deepseek-v2-lite": ("deepseek-v2-lite", {"tp": 16, "ep": 64}),
    "deepseek-v3.2": ("deepseek-v3.2", {"tp": 64, "ep": 256}),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_traffic_of_a_model_that_was_warmed_up_is_refused(name: str) -> None:
    model, setting = MODELS[name]
    options = {"context_len": 24, "max_context_len": MAX_LEN, "device": "cpu", "verify": False}
    done = kernelhub.warmup(model, token_counts=COUNTS, **options, **setting)
    assert done.ok, done.failures
    server = Server(model, "cpu", MAX_TOKENS, MAX_LEN, **setting)
    before = kernelhub.report().work
    made = []

    @settings(
        max_examples=30 if "deepseek-v3" in name else 60,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32))
    def traffic(seed: int) -> None:
        server.run(random.Random(seed))
        made.append(seed)

    with kernelhub.seal():
        traffic()
        assert kernelhub.report().after_seal == ()
    assert kernelhub.report().work == before
    assert len(made) >= 25


def test_what_the_model_does_not_have_is_refused() -> None:
    kernelhub.warmup("llama-3.1-8b", tp=8, token_counts=(1, 8), device="cpu", verify=False)
    q = torch.zeros(8, 4, 64, dtype=torch.bfloat16)
    with kernelhub.seal(), pytest.raises(NotWarmed):
        kernelhub.attention(*[q.view(1, 8, 4, 64)] * 3)


AHEAD: dict[str, tuple[str, dict[str, Any]]] = {
    "llama in blocks": ("llama-3.1-70b", {"tp": 32, "quantization": "fp8_block", "kv_dtype": "float8_e4m3fn"}),
    "llama in nvfp4": ("llama-3.1-8b", {"tp": 32, "quantization": "nvfp4"}),
    "gpt-oss": ("gpt-oss-120b", {"tp": 32, "ep": 128}),
    "deepseek-v3.2": ("deepseek-v3.2", {"tp": 64, "ep": 256}),
}


# What these launch is interpreted by the test of all models above; `make ahead` compiles them too.
LEFT_OUT = ("llama in blocks", "llama in nvfp4", "deepseek-v3.2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ahead] if name in LEFT_OUT else []) for name in AHEAD]
)
def test_with_tritons_compiler_for_an_h200_nothing_is_compiled_after_the_warm_up(name: str, tmp_path) -> None:
    model, setting = AHEAD[name]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.warming.triton_warmup", str(tmp_path), model, json.dumps(setting)]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    assert answer.returncode == 0, answer.stderr[-3000:]
    told: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    assert told["failures"] == []
    assert told["kernels"] == ["ahead.k"]
    assert told["compiled"] >= 16
    assert (told["refused"], told["after_seal"], told["more"]) == ([], 0, 0)
    assert told["calls"] == 300
