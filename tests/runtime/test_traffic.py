"""Zero is proved: traffic inside what was warmed does no work after seal; outside, the error's line makes it ready."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernelhub
from kernelhub.backends.cpp import build
from kernelhub.errors import NotWarmed
from tests.runtime.traffic import CALLS, DECLARED, OUTSIDE

_TIMEOUT_S = 1200


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Where C++ is compiled for these tests alone, so that they see it compiled."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def apart(compiled, monkeypatch):
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(compiled))
    build.library.cache_clear()
    yield
    build.library.cache_clear()


@pytest.fixture
def warmed():
    """Every op called at the declared token counts."""
    for call in CALLS.values():
        for tokens in DECLARED:
            call(tokens)


@pytest.mark.xdist_group("traffic")  # compiled once for all
class TestTraffic:
    def test_inside_does_no_work(self, warmed) -> None:
        before = kernelhub.report().work
        assert {(item.kind, item.by) for item in before} <= {("compile", "cpp")}

        @settings(max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.sampled_from(sorted(CALLS)), st.integers(1, max(DECLARED)))
        def traffic(name: str, tokens: int) -> None:
            CALLS[name](tokens)

        with kernelhub.seal():
            traffic()
            assert kernelhub.report().after_seal == ()
        assert kernelhub.report().work == before

    @pytest.mark.parametrize("name", OUTSIDE)
    def test_outside_is_refused_and_its_line_makes_it_ready(self, name: str, warmed) -> None:
        call = OUTSIDE[name]
        before = kernelhub.report().rows
        with kernelhub.seal():
            with pytest.raises(NotWarmed) as refused:
                call()
            with pytest.raises(NotWarmed):
                call()  # not forgotten
            assert kernelhub.report().rows == before
        assert refused.value.line in str(refused.value)
        exec(refused.value.line, {"kernelhub": kernelhub, "torch": torch})
        with kernelhub.seal():
            call()

    def test_every_call_has_a_line_that_makes_it_ready(self) -> None:
        for name, call in CALLS.items():
            with kernelhub.seal(), pytest.raises(NotWarmed) as refused:
                call(16)
            exec(refused.value.line, {"kernelhub": kernelhub, "torch": torch})
            with kernelhub.seal():
                assert call(16) is not None, name


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, Any]:
    """What the traffic told that runs with Triton's real compiler, in a process in which it does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.runtime.triton_traffic", str(tmp_path_factory.mktemp("triton"))]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_S)
    assert answer.returncode == 0, answer.stderr[-3000:]
    made: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return made


@pytest.mark.xdist_group("triton_traffic")
class TestWithTritonsCompiler:
    def test_warming_compiles_and_says_for_whom(self, told) -> None:
        assert told["compiled"] >= 3
        assert told["ops"] == ["fp8_gemm", "merge_attention_states", "quantize_fp8"]
        assert told["kernels"] == ["ahead.k"]
        assert min(told["seconds"]) > 0

    def test_inside_compiles_nothing(self, told) -> None:
        assert told["examples"] >= 100
        assert (told["after_seal"], told["more"]) == (0, 0)

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("a shifted operand", "compile"),
            ("a plan's strided operand", "compile"),
            ("more heads", "decide"),
            ("another N", "decide"),
        ],
    )
    def test_outside_is_refused_before_it_compiles_and_its_line_makes_it_ready(
        self, told, name: str, kind: str
    ) -> None:
        answer = told["outside"][name]
        assert (answer["refused"], answer["kind"]) == (True, kind)
        assert (answer["work"], answer["more"]) == (0, 0)
