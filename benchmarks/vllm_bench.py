"""vLLM's own benchmarks with each attention backend: `vllm bench serve`, `latency` and `throughput`.

    python benchmarks/vllm_bench.py latency --model /models/llama8b --backends CUSTOM,FLASH_ATTN --batch 8 \\
        --workload 1k/128 --engine-options "--load-format dummy" --out results.json
    python benchmarks/vllm_bench.py throughput --model /models/llama8b --backends CUSTOM,FLASH_ATTN --prompts 256 \\
        --workload 1k/1k --engine-options "--load-format dummy" --out results.json

`latency` is the time of whole batches in one process without a server, `throughput` that of many prompts at once.
`vllm bench serve` measures a server: `serving.py --vllm-cells` runs it by `served`, on the server whose cells it
measures itself, so that its client is checked by vLLM's. What a backend has in --out is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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


def ran(command: Sequence[str], result: Path, timeout_s: float) -> dict[str, Any]:
    """What a command wrote to `result`.

    Raises:
        SystemExit: the command failed, or took more than `timeout_s`; the text has the end of what it printed.
    """
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
    """The figures of `vllm bench serve` of a server that runs: `prompts` of `sizes` tokens, `clients` at once."""
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
    return {ours: round(float(found[theirs]), 4) for ours, theirs in NAMES.items() if theirs in found}


def measured(given: argparse.Namespace, backend: str, sizes: tuple[int, int]) -> dict[str, Any]:
    """One backend's row."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / f"{given.what}.json"
        command = ["vllm", "bench", given.what, "--model", given.model, "--attention-backend", backend]
        command += ["--input-len", str(sizes[0]), "--output-len", str(sizes[1]), "--output-json", str(result)]
        if given.what == "latency":
            command += [
                "--batch-size",
                str(given.batch),
                "--num-iters-warmup",
                "2",
                "--num-iters",
                str(given.iterations),
            ]
        else:
            command += ["--dataset-name", "random", "--num-prompts", str(given.prompts)]
        found = ran([*command, *given.engine_options.split()], result, given.timeout)
    if given.what == "latency":
        taken = found["latencies"]
        return {
            "batch": given.batch,
            "iterations": len(taken),
            "batch_s_p50": round(statistics.median(taken), 4),
            "batch_s_max": round(max(taken), 4),
            "output_tokens_per_s": round(given.batch * sizes[1] / statistics.median(taken), 1),
        }
    tokens = sum(sizes)
    return {
        "prompts": found["num_requests"],
        "seconds": round(found["elapsed_time"], 3),
        "total_tokens_per_s": round(found["tokens_per_second"], 1),
        "output_tokens_per_s": round(found["tokens_per_second"] * sizes[1] / tokens, 1),
    }


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("latency", "throughput"))
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--backends", type=lambda text: [part for part in text.split(",") if part], required=True)
    parser.add_argument("--workload", default="1k/128", help="INPUT/OUTPUT tokens, such as 1k/128")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a batch of `latency`")
    parser.add_argument("--iterations", type=int, default=5, help="batches of `latency`")
    parser.add_argument("--prompts", type=int, default=256, help="of `throughput`")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a backend")
    parser.add_argument("--engine-options", default="", help="more options of the engine, in one string")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "vllm_bench.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    import serving  # which imports this module

    given = parsed(arguments)
    sizes = serving.workload(given.workload, 1, 1 << 30)[0]
    results: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {"rows": []}
    results.setdefault("machine", serving.machine())
    form = {"what": given.what, "workload": given.workload}
    form["size"] = given.batch if given.what == "latency" else given.prompts
    for backend in given.backends:
        key = {**form, "backend": backend}
        if any(key.items() <= row.items() for row in results["rows"]):
            continue
        results["rows"].append({**key, **measured(given, backend, tuple(sizes))})
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(results["rows"][-1]), flush=True)


if __name__ == "__main__":
    main()
