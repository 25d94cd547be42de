"""SGLang's model runner in this process, with kernelhub's attention or another: speed and tokens.

    python benchmarks/sglang_engine.py --model /models/llama8b --backend kernelhub --out sglang.json
    python benchmarks/sglang_engine.py --model /models/llama8b --backend triton --out sglang.json
    python benchmarks/sglang_engine.py --model /models/llama8b --backend kernelhub --parts engine --out sglang.json
    python benchmarks/sglang_engine.py --out sglang.json --show

A model is a folder with config.json. Its weights are those of vllm_engine.py: random, or `--weights copying`. A command
is one process; --out collects them under their tags.

Parts: `speed`: milliseconds of decode steps, and seconds of the prompts before them. `tokens`: the best token and
log-probability after each token of given prompts that are decoded, and those of greedy decode. `engine`: output tokens
per second of `sglang.Engine`, with its scheduler and chunked prompts; alone in a command, with SGLang's random weights.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from copying_weights import Shape, copying_weights
from vllm_engine import CONTINUED, _Errors, _sizes, draw_weights, show, turn

ENVIRONMENT = {
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "kernelhub")
CAPTURED = (1, 2, 4, 8, 16, 32, 64)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of config.json")
    parser.add_argument("--backend", default="kernelhub", help="of SGLang's attention")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--parts", default="speed,tokens", help="speed, tokens; or engine alone")
    parser.add_argument("--points", default="1x1024,16x1024,64x1024", help="batch x tokens, of decode")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of a point; new tokens of `engine`")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--weights", choices=("random", "copying"), default="random")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--server", type=json.loads, default={}, help="JSON, more of SGLang's ServerArgs")
    parser.add_argument("--turns", metavar="FOLDER:COUNT:TIME", help="parts once COUNT commands have started")
    parser.add_argument("--tag", help="name of the run in --out")
    parser.add_argument("--out", type=Path, help="JSON file of all runs")
    parser.add_argument("--show", action="store_true", help="print the tables of --out, and run nothing")
    return parser.parse_args(arguments)


def server_arguments(options: argparse.Namespace) -> dict[str, Any]:
    eager = options.eager or options.device == "cpu"
    return {
        "model_path": str(options.model),
        "load_format": "dummy",
        "device": options.device,
        "dtype": "bfloat16",
        "attention_backend": options.backend,
        "sampling_backend": "pytorch",
        "page_size": options.page_size,
        "context_length": 8192,
        "max_running_requests": CAPTURED[-1],
        "mem_fraction_static": 0.8,
        "random_seed": 0,
        "log_level": "info",
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "disable_cuda_graph": eager,
        **({} if eager else {"cuda_graph_bs_decode": list(CAPTURED), "disable_prefill_cuda_graph": True}),
        **options.server,
    }


class Runner:
    """A started model runner of SGLang, driven as its own `one_batch` benchmark does.

    Attributes:
        start_s: seconds of its start.
        errors: errors that kernelhub's plugin has logged, such as a step that the warm-up did not cover.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.errors: list[str] = []
        logging.getLogger("kernelhub.compat").addHandler(_Errors(self.errors))
        importlib.import_module("sglang.srt.plugins").load_plugins()
        self._batch = importlib.import_module("sglang.benchmark.one_batch")
        settings = importlib.import_module("sglang.srt.server_args")
        # One extend step takes all prompts of a point.
        server = settings.ServerArgs(**{"chunked_prefill_size": 65536} | server_arguments(options))
        self._batch._set_envs_and_config(server)
        for name in ("initialize_moe_config", "initialize_fp8_gemm_config", "initialize_fp4_gemm_config"):
            getattr(self._batch, name)(server)
        importlib.import_module("sglang.srt.utils").configure_logger(server)
        began = time.perf_counter()
        self._runner, _ = self._batch.load_model(server, settings.PortArgs.init_new(server), 0, 0)
        self.start_s = time.perf_counter() - began
        self.inner = self._runner.torch_runner
        if options.weights == "copying":
            copying_weights(self.inner.model, Shape(self.inner.model.config))
        else:
            draw_weights(self.inner.model)
        self.vocabulary = int(self.inner.model_config.vocab_size)

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        draws = [random.Random(seed * 100_003 + i) for i in range(len(lengths))]
        return [
            [draw.randrange(2, self.vocabulary) for _ in range(size)] for draw, size in zip(draws, lengths, strict=True)
        ]

    def extend(self, prompts: list[list[int]]) -> tuple[Any, Any, Any]:
        """New requests: their first tokens, logits and SGLang's batch."""
        self._runner.clear()
        requests = self._batch.prepare_synthetic_inputs_for_latency_test(len(prompts), 0, prompts)
        return self._runner.extend(requests)

    def decode(self, tokens: Any, batch: Any) -> tuple[Any, Any]:
        return self._batch.decode(tokens, batch, self.inner)

    def wait(self) -> None:
        self._runner.synchronize()


def speed(runner: Runner, options: argparse.Namespace) -> dict[str, Any]:
    decode, prefill = [], []
    for index, (batch, length) in enumerate(_sizes(options.points)):
        prompts = runner.prompts([length] * batch, index)
        for steps in (8, options.steps):  # the second one counts
            runner.wait()
            began = time.perf_counter()
            tokens, _, requests = runner.extend(prompts)
            runner.wait()
            prompts_s, taken = time.perf_counter() - began, []
            for _ in range(steps):
                began = time.perf_counter()
                tokens, _ = runner.decode(tokens, requests)
                runner.wait()
                taken.append(1e3 * (time.perf_counter() - began))
        figures = {"batch": batch, "tokens": length, "steps": len(taken)}
        taken = sorted(taken[3:])
        whole = batch * len(taken) / sum(taken) * 1e3
        figures |= {"step_ms_p50": round(statistics.median(taken), 4), "tokens_per_s_whole": round(whole, 1)}
        figures["step_ms_p99"] = round(taken[min(len(taken) - 1, int(0.99 * len(taken)))], 4)
        decode.append(figures)
        print(json.dumps(figures), flush=True)
        prefill.append({"batch": batch, "tokens": length, "s": round(prompts_s, 4)})
    return {"decode": decode, "prefill": prefill}


def tokens(runner: Runner, options: argparse.Namespace) -> dict[str, Any]:
    """Best tokens and log-probabilities while given tokens are decoded, then of greedy decode."""
    prompts = runner.prompts(CONTINUED, 3000)
    given = torch.tensor(runner.prompts([200] * len(CONTINUED), 4000), device=options.device).T
    found: dict[str, Any] = {"best": [], "logprobs": [], "greedy": [], "greedy_logprobs": []}
    for greedy in (False, True):
        following, logits, batch = runner.extend(prompts)
        for step in range(len(given)):
            values = torch.log_softmax(logits.float(), -1)
            fed = values.argmax(-1) if greedy else given[step]
            picked = values.gather(1, fed[:, None])[:, 0]
            found["greedy" if greedy else "best"].append(values.argmax(-1).tolist())
            found["greedy_logprobs" if greedy else "logprobs"].append([round(value, 5) for value in picked.tolist()])
            following, logits = runner.decode(fed.to(following), batch)
    rows = {name: [list(row) for row in zip(*found[name], strict=True)] for name in ("greedy", "greedy_logprobs")}
    rows |= {name: [one for row in found[name] for one in row] for name in ("best", "logprobs")}
    own = zip(prompts, rows["greedy"], strict=True)
    copied = statistics.mean(token in prompt for prompt, ids in own for token in ids)
    return {**rows, "copied_share": round(copied, 4)}


def engine(options: argparse.Namespace) -> dict[str, Any]:
    """`sglang.Engine`: 64 prompts of 1024 tokens at once; the second of two rounds."""
    sglang = importlib.import_module("sglang")
    began = time.perf_counter()
    made = sglang.Engine(**server_arguments(options))
    start_s = time.perf_counter() - began
    vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    draw = random.Random(3)
    rows = []
    for batch, length in _sizes(options.points):
        prompts = [[draw.randrange(2, vocabulary) for _ in range(length)] for _ in range(batch)]
        sampling = {"temperature": 0, "max_new_tokens": options.steps, "ignore_eos": True}
        for _ in range(2):
            began = time.perf_counter()
            made.generate(input_ids=prompts, sampling_params=sampling)
            seconds = time.perf_counter() - began
        rows.append({"batch": batch, "tokens": length, "new": options.steps, "s": round(seconds, 3)})
        rows[-1]["tokens_per_s_whole"] = round(batch * options.steps / seconds, 1)
        mixed = [prompt[: 17 + 31 * i] for i, prompt in enumerate(prompts)]  # of different lengths, so that steps mix
        made.generate(input_ids=mixed, sampling_params=[sampling | {"max_new_tokens": 8 + 3 * i} for i in range(batch)])
        print(json.dumps(rows[-1]), flush=True)
    made.shutdown()
    return {"start_s": round(start_s, 2), "speed": {"decode": rows}, "errors_of_kernelhub": []}


def run(options: argparse.Namespace) -> dict[str, Any]:
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    result["options"] = {name: str(value) for name, value in vars(options).items() if name not in ("out", "show")}
    result["gpu"] = torch.cuda.get_device_name() if options.device == "cuda" else "none"
    result |= {"python": platform.python_version(), "packages": {name: metadata.version(name) for name in PACKAGES}}
    if options.parts == "engine":
        return result | engine(options)
    runner = Runner(options)
    result["start_s"] = round(runner.start_s, 2)
    calls: dict[str, Callable[..., Any]] = {"speed": speed, "tokens": tokens}
    with turn(options.turns):
        for part in options.parts.split(","):
            result[part] = calls[part](runner, options)
    report = importlib.import_module("kernelhub").report()
    return result | {
        "attention": type(runner.inner.attn_backend).__name__,
        "graphs": type(getattr(runner.inner, "decode_cuda_graph_runner", None)).__name__,
        "cache_tokens": int(runner.inner.max_total_num_tokens),
        "errors_of_kernelhub": runner.errors,
        "kernels": sorted({row.kernel for row in report.rows}),
        "sealed": report.sealed,
        "kernelhub_after_seal": [str(work) for work in report.after_seal if work.op is not None],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    runs = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    if not options.show:
        tag = options.tag or f"{options.model.name}-{options.backend}{'-eager' * options.eager}"
        runs[tag] = run(options)
        if options.out:
            options.out.write_text(json.dumps(runs, indent=1))
        runs = {tag: runs[tag]}
    print(show(runs), flush=True)
    if not options.show:
        os._exit(0)  # SGLang leaves threads that keep the interpreter


if __name__ == "__main__":  # SGLang's processes import this file
    main()
