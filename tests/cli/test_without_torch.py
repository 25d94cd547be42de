"""Commands that run no kernel answer in a second of CPU, since they leave torch alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

COMMANDS = (
    "--help",
    "backends",
    "backends --matrix",
    "cache list",
    "doctor",
    "env",
    "explain attention",
    "explain fp8_gemm --model lama-3.1-8b",
    "explain grouped_gemm --model glm-5-nvfp4 --device B200",
    "explain linear_attention --model ring-mini-linear-2.0",
    "explain paged_attention --device H200 --model llama-3.1-8b",
    "explain fp8_gemm --device B200 --with flashinfer=0.6.18",
    "info triton.split_kv",
    "lock --model llama-3.1-8b --device H200 --out -",
    "replay",
    "warmup --model llama-3.1-8b --device H200 --list",
)
# A second on an idle machine; on one that does other things too, a process costs up to twice the CPU.
MOST_CPU_S = 2.5
ASK = """
import contextlib, io, json, resource, sys
from kernelhub.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"code": code, "torch": "torch" in sys.modules, "cpu_s": used.ru_utime + used.ru_stime}))
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_it_answers_without_torch_in_a_second_of_cpu(command, tmp_path) -> None:
    environment = {**os.environ, "KERNELHUB_CACHE_DIR": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-c", ASK, *command.split()], capture_output=True, text=True, check=True, env=environment
    )
    told = json.loads(answer.stdout.splitlines()[-1])
    assert not told["torch"]
    assert told["code"] == (2 if " lama-" in command else 0)
    assert told["cpu_s"] < MOST_CPU_S
