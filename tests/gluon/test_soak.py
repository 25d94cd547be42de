"""What the soak on a GPU calls, in the emulator: a few of its draws, and that it sees what differs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.gluon import kernels
from tests.gluon import soak
from tests.gluon.emulated import emulated, on_the_cpu


@pytest.fixture(autouse=True)
def here(clean_hub: Any) -> Iterator[None]:
    with on_the_cpu(), emulated():
        yield


def test_every_kernel_is_drawn() -> None:
    assert set(soak.DRAWS) == {(kernel.op, kernel.name.removeprefix("gluon.")) for kernel in kernels.KERNELS}


@pytest.mark.parametrize(("op", "kernel"), soak.DRAWS, ids=["-".join(names) for names in soak.DRAWS])
def test_draws_are_right_and_repeat(op: str, kernel: str) -> None:
    for seed in range(2):
        outcome = soak.soak(op, kernel, "emulated", seed, 1, soak.EMULATED)
        assert outcome.right, (seed, outcome.figures)
        assert outcome.unequal == 0


@pytest.mark.parametrize("kernel", ["prefill_fp8", "prefill_fp8_any"])
@pytest.mark.parametrize("op", ["attention", "paged_attention"])
def test_softcap_sinks_and_lse_over_float8(op: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the cases of the ops have in bfloat16 alone."""
    drawn = soak._features

    def all_of_them(draw: random.Random, *rest: Any) -> dict[str, Any]:
        sinks = torch.linspace(-2, 4, rest[0].num_q_heads)
        return drawn(draw, *rest) | {"softcap": 2.0, "sinks": sinks, "return_lse": True}

    monkeypatch.setattr(soak, "_features", all_of_them)
    for seed in range(10, 13):
        outcome = soak.soak(op, kernel, "emulated", seed, 0, soak.EMULATED)
        assert outcome.right, (seed, outcome.figures)


def test_calls_that_differ_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    call, made = kernelhub.fp8_gemm, []

    def unsteady(**arguments: Any) -> Any:
        out = call(**arguments)
        made.append(out)
        if len(made) == 3:
            out[-1, -1] += 1
        return out

    monkeypatch.setattr(kernelhub, "fp8_gemm", unsteady)
    assert soak.soak("fp8_gemm", "fp8_gemm", "emulated", 0, 3, soak.EMULATED).unequal == 1


def test_what_a_process_found_is_kept_when_it_fails(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found = {"op": "fp8_gemm", "kernel": "fp8_gemm", "calls": 20, "draws": 1, "wrong": [], "unequal": 3, "s": 0.1}
    answers = [
        subprocess.CompletedProcess([], 1, json.dumps(found) + "\n", ""),
        subprocess.CompletedProcess([], -9, "", ""),
    ]
    monkeypatch.setattr(subprocess, "run", lambda *given, **named: answers.pop(0))
    for options in (["--draws", "1"], ["--together"]):
        monkeypatch.setattr(sys, "argv", ["soak", "--kernels", "fp8_gemm/fp8_gemm", *options])
        assert soak.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [found, {"op": "fp8_gemm", "kernel": "fp8_gemm", "error": "exit -9"}]
