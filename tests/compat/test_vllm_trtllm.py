"""When attention runs on FlashInfer's TensorRT-LLM kernels: every rule of vLLM's, one case each."""

from __future__ import annotations

import ast
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.compat.vllm import flashinfer as fi
from kernelhub.compat.vllm.flashinfer import trtllm
from kernelhub.probes.finding import found, lacking

HOPPER, BLACKWELL, RTX, AMPERE = (9, 0), (10, 0), (12, 0), (8, 0)
PLAIN = {
    "num_qo_heads": 32,
    "num_kv_heads": 8,
    "num_tokens": 64,
    "max_seq_len": 4096,
    "dcp_world_size": 1,
    "kv_cache_dtype": "auto",
    "q_dtype": torch.bfloat16,
    "is_prefill": False,
}


GRID: dict[str, tuple[Any, ...]] = {
    "num_kv_heads": (8, 5),
    "num_tokens": (256, 257),
    "dcp_world_size": (1, 2),
    "kv_cache_dtype": ("auto", "fp8", "bfloat16"),
    "q_dtype": (torch.bfloat16, torch.float8_e4m3fn),
    "is_prefill": (False, True),
    "force_use_trtllm": (None, True, False),
    "has_sinks": (False, True),
    "has_spec": (False, True),
}


@pytest.fixture(autouse=True)
def flashinfer_is_here(monkeypatch):
    kernelhub.reload()
    monkeypatch.setattr(trtllm, "_warned", set())
    monkeypatch.setattr(trtllm.has_flashinfer, "why", lambda: found("flashinfer", "0.7", "here"))
    monkeypatch.setattr(trtllm.has_nvidia_artifactory, "why", lambda: found("cubins", None, "here"))


@pytest.fixture
def on(monkeypatch):
    def device(sm):
        for module in ("here", "flashinfer.trtllm"):
            monkeypatch.setattr(f"kernelhub.compat.vllm.{module}.capability", lambda: sm)

    return device


@pytest.mark.parametrize(
    ("sm", "decode", "prefill"),
    [
        (HOPPER, True, False),
        (BLACKWELL, True, True),
        ((10, 3), True, True),
        (RTX, True, False),
        ((12, 1), True, False),
        (AMPERE, False, False),
        ((11, 0), False, False),
        (None, False, False),
    ],
    ids=str,
)
def test_which_devices_have_the_kernels(on, sm, decode, prefill) -> None:
    on(sm)
    assert fi.supports_trtllm_attention() is decode
    assert fi.supports_trtllm_attention(is_prefill=True) is prefill


@pytest.mark.parametrize("name", ["VLLM_BATCH_INVARIANT", "KERNELHUB_BATCH_INVARIANT"])
def test_batch_invariance_rules_them_out(on, monkeypatch, name) -> None:
    on(BLACKWELL)
    monkeypatch.setenv(name, "1")
    kernelhub.reload()
    assert fi.supports_trtllm_attention.why().code == "batch_variant"


def test_without_cubins_or_flashinfer_they_are_not_there(on, monkeypatch) -> None:
    on(BLACKWELL)
    absent = lacking("cubins", "cubins_missing", "none", "install them")
    monkeypatch.setattr(trtllm.has_nvidia_artifactory, "why", lambda: absent)
    assert fi.supports_trtllm_attention.why() == absent
    assert not fi.use_trtllm_attention(**PLAIN)


RULES = [
    # (device, what differs, answer)
    (BLACKWELL, {}, True),
    (BLACKWELL, {"num_tokens": 256}, True),
    (BLACKWELL, {"num_tokens": 257}, False),
    (BLACKWELL, {"kv_cache_dtype": "fp8"}, False),
    (BLACKWELL, {"max_seq_len": 10**6}, True),
    (HOPPER, {"kv_cache_dtype": "fp8", "num_tokens": 4096}, True),
    (RTX, {"kv_cache_dtype": "fp8_e4m3", "num_tokens": 4096}, True),
    (HOPPER, {"kv_cache_dtype": "nvfp4"}, False),
    (BLACKWELL, {"is_prefill": True, "num_tokens": 9999}, True),
    (BLACKWELL, {"is_prefill": True, "kv_cache_dtype": "fp8"}, False),
    (HOPPER, {"is_prefill": True}, False),
    (BLACKWELL, {"force_use_trtllm": False}, False),
    (BLACKWELL, {"force_use_trtllm": False, "has_sinks": True}, False),
    (BLACKWELL, {"force_use_trtllm": True, "num_tokens": 9999}, True),
    (BLACKWELL, {"force_use_trtllm": True, "kv_cache_dtype": "fp8", "is_prefill": True}, True),
    (HOPPER, {"force_use_trtllm": True, "is_prefill": True}, False),
    (AMPERE, {"force_use_trtllm": True}, False),
    (BLACKWELL, {"dcp_world_size": 2}, False),
    (BLACKWELL, {"dcp_world_size": 2, "force_use_trtllm": True}, False),
    (BLACKWELL, {"num_kv_heads": 5}, False),
    (BLACKWELL, {"num_kv_heads": 5, "has_sinks": True}, False),
    (BLACKWELL, {"has_sinks": True, "kv_cache_dtype": "fp8", "num_tokens": 9999}, True),
    (BLACKWELL, {"has_spec": True, "kv_cache_dtype": "fp8"}, True),
    (BLACKWELL, {"has_spec": True, "kv_cache_dtype": "fp8", "is_prefill": True}, False),
    (BLACKWELL, {"q_dtype": torch.float8_e4m3fn, "kv_cache_dtype": "fp8", "is_prefill": True}, True),
    (AMPERE, {"has_sinks": True}, False),
    (None, {}, False),
]


@pytest.mark.parametrize(("sm", "change", "answer"), RULES, ids=lambda value: str(value))
def test_every_rule(on, sm, change, answer) -> None:
    on(sm)
    assert fi.use_trtllm_attention(**PLAIN | change) is answer
    finding = fi.use_trtllm_attention.why(**PLAIN | change)
    assert finding.reason
    assert finding.ok is answer


def test_a_override_that_cannot_be_met_is_warned_of_once(on, caplog) -> None:
    on(AMPERE)
    for _ in range(3):
        assert not fi.use_trtllm_attention(**PLAIN, force_use_trtllm=True)
    assert caplog.text.count("TRTLLM attention is not used for decode") == 1
    assert not fi.use_trtllm_attention(**PLAIN)


class TestForce:
    def test_nobody_said(self) -> None:
        assert fi.force_use_trtllm_attention() is None

    @pytest.mark.parametrize(("text", "said"), [("1", True), ("true", True), ("0", False), ("perhaps", None)])
    def test_the_variable_of_older_releases(self, monkeypatch, text, said) -> None:
        monkeypatch.setenv("VLLM_USE_TRTLLM_ATTENTION", text)
        kernelhub.reload()
        assert fi.force_use_trtllm_attention() is said

    def test_vllm_s_own_configuration_is_stronger(self, monkeypatch, on) -> None:
        on(BLACKWELL)
        attention = SimpleNamespace(use_trtllm_attention=False, disable_flashinfer_q_quantization=True)
        module = SimpleNamespace(get_current_vllm_config_or_none=lambda: SimpleNamespace(attention_config=attention))
        monkeypatch.setenv("VLLM_USE_TRTLLM_ATTENTION", "1")
        kernelhub.reload()
        assert fi.can_use_trtllm_attention(32, 8)
        monkeypatch.setitem(sys.modules, "vllm.config", module)
        assert fi.force_use_trtllm_attention() is False
        assert not fi.can_use_trtllm_attention(32, 8)
        assert fi.flashinfer_disable_q_quantization()

    def test_heads_have_to_divide(self, on) -> None:
        on(BLACKWELL)
        assert fi.can_use_trtllm_attention(32, 8, is_prefill=True)
        assert not fi.can_use_trtllm_attention(32, 5)
        on(HOPPER)
        assert not fi.can_use_trtllm_attention(32, 8, is_prefill=True)


def test_the_device_is_vllm_s_answer_until_cuda_is_in_use(monkeypatch) -> None:
    from kernelhub.compat.vllm.here import capability

    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use in this process: 1 case")
    platform = SimpleNamespace(get_device_capability=lambda: SimpleNamespace(major=10, minor=3), is_cuda=lambda: True)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    assert capability() == (10, 3)


def test_every_answer_is_that_of_a_real_vllm(monkeypatch) -> None:
    """Its own functions, cut out of the file that UNPACKED_VLLM names, on a grid of devices, batches and overrides."""
    given = os.environ.get("UNPACKED_VLLM")
    if not given:
        pytest.skip("UNPACKED_VLLM names no unpacked vLLM: 1 case")
    sm: tuple[int, int] | None = None
    platform = SimpleNamespace(
        is_device_capability=lambda number: sm is not None and 10 * sm[0] + sm[1] == number,
        is_device_capability_family=lambda number: sm is not None and 10 * sm[0] == number,
        fp8_dtype=lambda: torch.float8_e4m3fn,
    )
    logger = SimpleNamespace(info_once=lambda *words: None, warning_once=lambda *words: None)
    theirs: dict[str, Any] = {
        "torch": torch,
        "current_platform": platform,
        "logger": logger,
        "envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False),
        "has_nvidia_artifactory": lambda: True,
    }
    for node in ast.parse((Path(given) / "utils" / "flashinfer.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in ("supports_trtllm_attention", "use_trtllm_attention"):
            node.decorator_list = []
            exec(compile(ast.Module([node], []), "vllm", "exec"), theirs)
    for module in ("here", "flashinfer.trtllm"):
        monkeypatch.setattr(f"kernelhub.compat.vllm.{module}.capability", lambda: sm)
    asked = 0
    for sm in (None, AMPERE, HOPPER, BLACKWELL, (10, 3), (11, 0), RTX, (12, 1)):
        for values in itertools.product(*GRID.values()):
            batch = PLAIN | dict(zip(GRID, values, strict=True))
            assert fi.use_trtllm_attention(**batch) is bool(theirs["use_trtllm_attention"](**batch)), (sm, batch)
            asked += 1
    assert asked > 5000
