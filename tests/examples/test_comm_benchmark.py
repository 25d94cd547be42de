"""benchmarks/comm.py: wrong options end it before ranks start."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OFF = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")  # which it sets when imported


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in OFF:
        monkeypatch.setenv(name, "1")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("comm")
    sys.modules.pop("comm", None)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            "--kernels triton.one_shoot",
            "triton.one_shoot is no kernel of all_reduce, .*; did you mean triton.one_shot",
        ),
        ("--ops all_gather --kernels triton.two_shot", "triton.two_shot is no kernel of all_gather"),
        ("--format fp8_grop", "format is 'fp8_grop'; give None or one of fp8_tensor"),
        ("--sizes 8192 0", "--ranks and --sizes are 1 or more"),
        ("--ranks 0", "--ranks and --sizes are 1 or more"),
        ("--ops all_reduced", "invalid choice: 'all_reduced'"),
    ],
)
def test_wrong_options_say_what_is_right(comm, capsys, arguments: str, reason: str) -> None:
    with pytest.raises(SystemExit):
        comm.parse(arguments.split())
    *before, after = reason.split(".*")
    said = capsys.readouterr().err
    assert all(part in said for part in (*before, after))


def test_kernels_of_one_of_the_ops_are_taken(comm) -> None:
    options = comm.parse(
        ["--ops", "all_reduce", "all_reduce_rms_norm", "--kernels", "triton.one_shot_quant", "--format", "nvfp4"]
    )
    assert (options.kernels, options.format) == (["triton.one_shot_quant"], "nvfp4")
