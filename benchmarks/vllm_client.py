"""`vllm bench`, run as a command: what it wrote, and its figures of a server that runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# The figures of `vllm bench serve` by the names of serving.py.
NAMES = {
    "output_tokens_per_s": "output_throughput",
    "total_tokens_per_s": "total_token_throughput",
    "seconds": "duration",
    "requests": "completed",
    "input_tokens": "total_input_tokens",
    "output_tokens": "total_output_tokens",
    "ttft_ms_p50": "median_ttft_ms",
    "ttft_ms_p99": "p99_ttft_ms",
    "itl_ms_p50": "median_itl_ms",
    "itl_ms_p99": "p99_itl_ms",
    "tpot_ms_p50": "median_tpot_ms",
    "tpot_ms_p99": "p99_tpot_ms",
}


def needed(command: str) -> None:
    """Nothing, if there is such a command.

    Raises:
        SystemExit: there is none.
    """
    if shutil.which(command) is None:
        raise SystemExit(f"the command {command} is not on PATH: install vLLM, or activate its environment")


def ran(command: Sequence[str], result: Path, timeout_s: float) -> dict[str, Any]:
    """What a command wrote to `result`.

    Raises:
        SystemExit: it is not installed, failed, or took more than `timeout_s`; the text has the end of what it printed.
    """
    needed(command[0])
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    log = result.with_suffix(".log")
    with log.open("w") as file:
        try:
            code: object = subprocess.run(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=timeout_s
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"no result within {timeout_s:g} s"
    if code != 0 or not result.exists():
        raise SystemExit(f"{' '.join(command[:3])} ended with {code}:\n{log.read_text()[-3000:]}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def served(
    address: tuple[str, int], model: str, tokenizer: str, sizes: tuple[int, int], prompts: int, clients: int
) -> dict[str, Any]:
    """The figures of `vllm bench serve` of a server that runs: `prompts` of `sizes` tokens, `clients` at once.

    Raises:
        SystemExit: the command failed, or requests did, which vLLM's client only counts.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "serve.json"
        command = ["vllm", "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"]
        command += ["--base-url", f"http://{address[0]}:{address[1]}", "--model", model, "--tokenizer", tokenizer]
        command += ["--dataset-name", "random", "--random-input-len", str(sizes[0])]
        command += ["--random-output-len", str(sizes[1]), "--num-prompts", str(prompts), "--ignore-eos"]
        command += ["--max-concurrency", str(clients), "--num-warmups", str(clients), "--seed", "2"]
        command += ["--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "99", "--disable-tqdm"]
        command += ["--save-result", "--result-dir", folder, "--result-filename", result.name]
        found = ran(command, result, 600.0)
        if found["completed"] != prompts:
            end = result.with_suffix(".log").read_text()[-3000:]
            raise SystemExit(f"vllm bench serve: {found['completed']} of {prompts} requests were completed:\n{end}")
    return {ours: round(float(found[theirs]), 4) for ours, theirs in NAMES.items() if theirs in found}
