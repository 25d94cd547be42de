"""The log of an engine that docs/engines.md shows has the kernels that are selected on an H200."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import kernelhub
from kernelhub.compat.start import DECODE, MIXED
from kernelhub.dispatch.machine import SimulatedMachine

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
LIBRARIES = {"triton": "3.6.0", "vllm": "0.33.0", "cuda": "13.0.3"}
# What vLLM's plugin asks of the layers of Llama 3.1 8B.
LAYERS = {
    "q_dtype": torch.bfloat16,
    "kv_dtype": torch.bfloat16,
    "kv_scale": None,
    "head_dim_qk": 128,
    "head_dim_vo": 128,
    "num_q_heads": 32,
    "num_kv_heads": 8,
    "page_size": 16,
    "causal": True,
    "window_left": False,
    "softcap": False,
    "sinks": False,
}


def selected(libraries: dict[str, str]) -> str:
    machine = SimulatedMachine(libraries)
    return "; ".join(
        f"{name}: {kernelhub.explain('paged_attention', device='H200', machine=machine, **LAYERS, **step).selected}"
        for name, step in (DECODE | MIXED).items()
    )


def test_the_log_has_what_is_selected_on_an_h200() -> None:
    (shown,) = re.findall(r"^kernelhub: 32 layers like \S+: (.*)$", PAGE.read_text(), re.MULTILINE)
    assert shown == selected(LIBRARIES)


def test_without_cuda_bindings_it_is_what_servers_logged() -> None:
    """`benchmarks/results/vllm_h200.json` has such a line of a server before `cuda.paged_decode`."""
    lacking = selected({name: version for name, version in LIBRARIES.items() if name != "cuda"})
    logged = (PAGE.parents[1] / "benchmarks" / "results" / "vllm_h200.json").read_text()
    assert f"kernelhub: 32 layers like model.layers.0.self_attn.attn: {lacking}" in logged
