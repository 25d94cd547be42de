"""After `kernelhub.warmup(model)` on a GPU, random traffic of that model compiles, loads and decides nothing."""

from __future__ import annotations

import random

import pytest

import kernelhub
from tests.warming.traffic import Server

pytestmark = pytest.mark.gpu

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MODELS = [
    ("llama-3.1-8b", {"tp": 1}),
    ("llama-3.1-8b", {"tp": 2, "quantization": "fp8_block", "kv_dtype": "float8_e4m3fn"}),
    ("gpt-oss-120b", {"tp": 8, "ep": 8}),
    ("deepseek-v3.2", {"tp": 8, "ep": 8}),
]


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path / "caches"))


@pytest.mark.parametrize(("model", "setting"), MODELS, ids=str)
def test_no_traffic_compiles_after_the_warm_up(model, setting) -> None:
    done = kernelhub.warmup(model, token_counts=COUNTS, max_context_len=4096, verify=False, **setting)
    assert done.ok, done.failures
    server = Server(model, "cuda", max(COUNTS), 4096, **setting)
    compiled = [work for work in kernelhub.report().work if work.kind == "compile"]
    with kernelhub.seal():
        for seed in range(400):
            server.run(random.Random(seed))
        assert kernelhub.report().after_seal == ()
    assert [work for work in kernelhub.report().work if work.kind == "compile"] == compiled


def test_children_compile_and_this_process_loads() -> None:
    done = kernelhub.warmup("llama-3.1-8b", tp=8, token_counts=(1, 64, 512), jobs=2, verify=False)
    assert done.ok, done.failures
    assert done.jobs == 2


def test_the_chosen_kernels_are_right() -> None:
    done = kernelhub.warmup("llama-3.1-8b", tp=8, phases=["decode"], token_counts=(1, 64))
    assert done.ok
    assert done.quarantined == ()
    assert done.verified
