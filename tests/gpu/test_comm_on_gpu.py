"""Kernels of the collectives on several GPUs: each in processes of its own, which end after a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernelhub
from kernelhub.ops.fused_quant.problem import FORMATS

pytestmark = pytest.mark.gpu

OPS = ("all_reduce", "all_reduce_rms_norm", "reduce_scatter", "all_gather")
KERNELS = [
    (op, kernel)
    for op in OPS
    for kernel in getattr(kernelhub, op).kernels()
    if not kernel.startswith("unsupported.")  # records that say why there is no kernel
    and "quant" not in kernel
]
QUANTISED = ("triton.one_shot_quant", "comm_pairs.sum_then_quant")
RANKS = 2


# Dispatches and combines with a capacity; each takes what the other's kernel gives.
PAIRS = [
    ("triton.push", "triton.push"),
    ("torch.gather_fixed", "triton.push"),
    ("triton.push", "torch.all_to_all_fixed"),
    ("torch.all_to_all_fixed", "torch.reduce_scatter_fixed"),
    ("flashinfer.moe_a2a", "flashinfer.moe_a2a"),
    ("torch.gather_fixed", "flashinfer.moe_a2a"),
]


@pytest.mark.parametrize(("op", "kernel"), KERNELS)
def test_conformance(op: str, kernel: str) -> None:
    check("tests.gpu.comm_conformance", op, kernel)


@pytest.mark.parametrize("kernel", QUANTISED)
@pytest.mark.parametrize("form", FORMATS[1:])
def test_conformance_of_quantised_norms(form: str, kernel: str) -> None:
    check("tests.gpu.comm_conformance", "all_reduce_rms_norm", kernel, "--format", form)


@pytest.mark.parametrize(("dispatch", "combine"), PAIRS)
def test_conformance_of_experts(dispatch: str, combine: str) -> None:
    check("tests.gpu.expert_conformance", dispatch, combine)


def test_conformance_of_experts_without_a_capacity() -> None:
    check("tests.gpu.expert_conformance", "triton.push_exact", "triton.push_exact", "--exact")


@pytest.mark.parametrize(("kernel", "how"), [("deep_ep.normal_fixed", ()), ("deep_ep.normal", ("--exact",))])
def test_conformance_of_deep_ep(kernel: str, how: tuple[str, ...]) -> None:
    check("tests.gpu.expert_conformance", kernel, kernel, "--width", "3072", *how)


def test_with_check_unlike_ranks_raise_before_a_launch() -> None:
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"{RANKS} GPUs are needed")
    command = [sys.executable, "-m", "tests.gpu.unlike_ranks", "--ranks", str(RANKS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=200)
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers["ended"] == [0] * RANKS, done.stderr[-2000:]
    for rank in answers["ranks"]:
        assert rank.pop("costs")
        for scene, answer in rank.items():
            if scene.startswith("refused"):
                assert answer.get("refused") or "rank 1 cannot run it" in answer["raised"], scene
                assert answer["s"] < 10, scene
                assert answer["after"] == RANKS, scene
                continue
            assert answer["raised"].startswith("arguments_differ "), scene
            assert " on rank 0 and " in answer["raised"], scene
            assert answer["after"] == RANKS, scene
        assert "op is all_reduce on rank 0 and all_gather on rank 1" in rank["op"]["raised"]


def test_results_that_calls_make() -> None:
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"{RANKS} GPUs are needed")
    command = [sys.executable, "-m", "tests.gpu.comm_fresh", "--ranks", str(RANKS), "--limit-s", "150"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=200)
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers["ended"] == [0] * RANKS, done.stderr[-2000:]
    for rank in answers["ranks"]:
        assert {name: found["wrong"] for name, found in rank.items() if found["wrong"]} == {}
        assert all(one.split(" ")[1] == "0" for found in rank.values() for one in found["python"]), rank


def check(module: str, *names: str) -> None:
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"{RANKS} GPUs are needed")
    command = [sys.executable, "-m", module, *names, "--ranks", str(RANKS), "--calls", "2000"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=300)
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers["ended"] == [0] * RANKS, done.stderr[-2000:]
    for answer in answers["ranks"]:
        if "unsupported" in answer:
            pytest.skip(answer["unsupported"])
        wrong = {
            scene: found
            for scene, found in answer.items()
            if scene not in ("kernels", "parts", "connection", "seconds", "at", "at_s", "exchanged") and found
        }
        assert not wrong
