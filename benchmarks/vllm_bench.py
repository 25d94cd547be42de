"""vLLM's own benchmarks with each attention backend: `vllm bench serve`, `latency` and `throughput`.

    python benchmarks/vllm_bench.py latency --model /models/llama8b --backends CUSTOM,FLASH_ATTN --batch 8 \\
        --workload 1k/128 --engine-options "--load-format dummy" --out results.json
    python benchmarks/vllm_bench.py throughput --model /models/llama8b --backends CUSTOM,FLASH_ATTN --prompts 256 \\
        --workload 1k/1k --engine-options "--load-format dummy" --out results.json

`latency` is the time of whole batches in one process without a server, `throughput` that of many prompts at once.
`vllm bench serve` measures a server: `serving.py --vllm-cells` runs it on the server whose cells it measures itself,
so that its client is checked by vLLM's. What a backend has in --out is not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import serving
from vllm_client import ran

ROOT = Path(__file__).parents[1]


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
