"""vLLM's engine in this process, with kernelhub's attention or another: speed, numbers, and what serving does to both.

    python benchmarks/vllm_engine.py --model /models/llama8b --backend CUSTOM --out vllm.json
    python benchmarks/vllm_engine.py --model /models/llama8b --backend FLASH_ATTN --eager --out vllm.json
    python benchmarks/vllm_engine.py --model /models/gptoss --backend CUSTOM --eager --parts numbers --out vllm.json
    python benchmarks/vllm_engine.py --out vllm.json --show

A model is a folder with config.json and a tokenizer. Its weights are random: normal(0, 0.02), norms 1, sinks
normal(0, 1), each parameter by a generator seeded with its name, so that every backend has the same; or, with
`--weights copying`, those of copying_weights.py, whose greedy tokens depend on attention and hardly on rounding.
`--float4` quantises the linear layers' weights (float4_weights.py). A command is one engine; --out collects them under
their tags. `--turns` lets several commands start on one GPU at once and run their parts one after the other.

Parts: `speed`: milliseconds of decode steps for batches of equal prompts (after the last prompt's first token, without
the last two steps), and seconds of prompts alone. `numbers`: each attention layer's output against float64 of the same
queries and cache, and its distance after rounding alone; eager decode steps too with --eager. `tokens`: the best token
and log-probability after each token of given prompts, and those of greedy decode, to compare backends by --show.
`stress`: 1000 decode steps, more requests than the cache holds, a shared prefix; each twice, with the share of equal
tokens. `watch`: what kernelhub's own calls did under mixed traffic, of which --eager shows every one: microseconds of
Python for a layer and for a step's metadata, waits for the GPU, and Triton kernels compiled in them. `hosts`: the same
with the KV cache written by kernelhub's kernel, by vLLM's, and by kernelhub's again. `writes`: the KV cache written by
vLLM's kernel and by kernelhub's in turn: whether the bytes are the same, microseconds of Python and of a graph of all
layers, and, with --eager, greedy tokens and steps. `bytes`: of that, the writes alone.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import json
import logging
import math
import os
import platform
import random
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from copying_weights import Shape, parameter
from float4_weights import CONFIGS, fill
from torch import Tensor

PARTS = ("speed", "numbers", "tokens", "stress", "watch", "hosts", "writes", "bytes")
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, where its steps can be timed
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # FlashInfer may be missing, and sampling is not measured
    "HF_HUB_OFFLINE": "1",
}
PACKAGES = ("torch", "triton", "vllm", "transformers", "kernelhub")
CAPTURED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPTS = (17, 37, 64, 128, 250, 500, 777, 1500)  # tokens, of `numbers`
TAUGHT = (300, 1200)  # tokens, of `tokens`
WRITTEN = (1, 16, 64, 256, 2048)  # tokens of a step, of `writes`
CONTINUED = tuple(range(420, 1620, 75))  # tokens of the prompts that greedy decode continues


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of config.json and a tokenizer")
    parser.add_argument("--backend", default="CUSTOM", help="of vLLM's attention; CUSTOM is kernelhub's")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--parts", default="speed,tokens", help=", ".join(PARTS))
    parser.add_argument("--early", default="", help="parts before the turn of --turns, as other commands do no harm")
    parser.add_argument("--points", default="1x1024,16x1024,64x1024,256x512,16x8192", help="batch x tokens, of decode")
    parser.add_argument("--prefill", default="8x2048,2x8192", help="batch x tokens, of prompts alone")
    parser.add_argument("--steps", type=int, default=96, help="decode steps of a point")
    parser.add_argument("--max-model-len", type=int, default=9216)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON, more arguments of vllm.LLM")
    parser.add_argument("--weights", choices=("random", "copying"), default="random")
    parser.add_argument("--float4", choices=tuple(CONFIGS), help="format of the linear layers' weights")
    parser.add_argument("--turns", metavar="FOLDER:COUNT:TIME", help="parts once COUNT commands have started")
    parser.add_argument("--repeating", action="store_true", help="the prompts that runs with speculation have")
    parser.add_argument("--tag", help="name of the run in --out")
    parser.add_argument("--out", type=Path, help="JSON file of all runs")
    parser.add_argument("--show", action="store_true", help="print the tables of --out, and run nothing")
    return parser.parse_args(arguments)


class Engine:
    """A started vLLM engine.

    Attributes:
        llm: vLLM's LLM.
        start_s: seconds of its start.
        errors: errors that kernelhub's plugin has logged, such as a step that the warm-up did not cover.
        linear: how many linear layers each of vLLM's classes of quantised kernels serves.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
        vllm = importlib.import_module("vllm")
        self.errors: list[str] = []
        logging.getLogger("vllm.plugins.kernelhub").addHandler(_Errors(self.errors))
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(CAPTURED)}
        arguments = {
            "model": str(options.model),
            "load_format": "dummy",
            "dtype": "bfloat16",
            "attention_backend": options.backend,
            "enforce_eager": options.eager,
            "max_num_seqs": CAPTURED[-1],
            "max_num_batched_tokens": 8192,
            "max_model_len": options.max_model_len,
            "gpu_memory_utilization": 0.8,
            "enable_prefix_caching": False,
            "kv_cache_dtype": options.kv_cache_dtype,
            "max_logprobs": 32,
            **({"hf_overrides": {"quantization_config": CONFIGS[options.float4]}} if options.float4 else {}),
            **({} if options.eager else {"compilation_config": graphs}),
            **options.engine,
        }
        began = time.perf_counter()
        with seeded_weights(copying=options.weights == "copying") as models:
            self.llm = vllm.LLM(**arguments)
            self.linear = linear_kernels(models)
        self.start_s = time.perf_counter() - began
        self.params = vllm.SamplingParams
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        speculative = self.llm.llm_engine.vllm_config.speculative_config
        self.queries = 1 if speculative is None else 1 + speculative.num_speculative_tokens
        self.repeating = options.repeating or self.queries > 1

    def prompt(self, length: int, seed: int) -> dict[str, list[int]]:
        """Random tokens; for speculation, and with --repeating, the same ones three times."""
        draw = random.Random(seed)
        ids = [draw.randrange(2, self.vocabulary) for _ in range(length)]
        return {"prompt_token_ids": (ids[: -(-length // 3)] * 3)[:length] if self.repeating else ids}

    def sampling(self, tokens: int, **more: Any) -> Any:
        return self.params(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)

    def generate(self, prompts: list[Any], tokens: int, **more: Any) -> Any:
        return self.llm.generate(prompts, self.sampling(tokens, **more), use_tqdm=False)

    def steps(self, batch: int, length: int, tokens: int, seed: int) -> list[tuple[float, int, int]]:
        """Run requests to their end: of each step its seconds, its new tokens, and the requests that got some."""
        engine = self.llm.llm_engine
        for i in range(batch):
            name = f"{seed}-{i}-{time.time_ns()}"
            engine.add_request(name, self.prompt(length, seed * 100_003 + i), self.sampling(tokens))
        torch.cuda.synchronize()
        done, rows, outputs, last = 0, [], [], time.perf_counter()
        while done < batch:
            output = engine.engine_core.get_output()
            now = time.perf_counter()
            if not output.outputs:
                continue
            done += sum(row.finish_reason is not None for row in output.outputs)
            rows.append((now - last, sum(len(row.new_token_ids) for row in output.outputs), len(output.outputs)))
            outputs.append(output)
            last = now
        for output in outputs:
            engine.output_processor.process_outputs(output.outputs, engine_core_timestamp=output.timestamp)
        return rows

    @property
    def layers(self) -> list[Any]:
        found = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        return [layer for layer in found if hasattr(layer, "impl")]


class _Errors(logging.Handler):
    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(record.getMessage())


@contextmanager
def seeded_weights(*, copying: bool) -> Iterator[list[torch.nn.Module]]:
    """Draw the weights of dummy models anew, before vLLM packs them; gives the models."""
    loader = importlib.import_module("vllm.model_executor.model_loader.dummy_loader").DummyModelLoader
    plain = loader.load_weights
    models: list[torch.nn.Module] = []

    def load_weights(self: Any, model: torch.nn.Module, *given: Any, **named: Any) -> Any:
        plain(self, model, *given, **named)
        shape = Shape(model.config) if copying else None
        fill(model, draw_weight if shape is None else lambda name, weight: copy_weight(name, weight, shape))
        models.append(model)

    loader.load_weights = load_weights
    try:
        yield models
    finally:
        loader.load_weights = plain


def linear_kernels(models: Sequence[torch.nn.Module]) -> dict[str, int]:
    """How many layers of the models each class of quantised kernels serves."""
    found: Counter[str] = Counter()
    for module in (module for model in models for module in model.modules()):
        for owner in (getattr(module, "scheme", None), getattr(module, "quant_method", None)):
            kernel = getattr(owner, "kernel", None) or getattr(owner, "fp8_linear", None)
            if kernel is not None:
                found[type(kernel).__name__] += 1
                break
    return dict(found)


def draw_weights(model: torch.nn.Module) -> None:
    """normal(0, 0.02), norms 1, sinks normal(0, 1), each seeded with its name."""
    fill(model, draw_weight)


def draw_weight(name: str, weight: Tensor) -> None:
    if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return
    generator = torch.Generator(device=weight.device)
    generator.manual_seed(zlib.crc32(name.encode()))
    if weight.ndim == 1 and "norm" in name:
        weight.fill_(1.0)
    else:
        weight.normal_(0.0, 1.0 if "sinks" in name else 0.02, generator=generator)


def copy_weight(name: str, weight: Tensor, shape: Shape) -> None:
    weight.copy_(parameter(name, weight, shape))


@contextmanager
def turn(given: str | None) -> Iterator[None]:
    """Wait until other commands have started, or until a time, and then until none of them runs its parts.

    Args:
        given: a folder that they share, how many they are (`never`: wait for the time) and the time in seconds since
            1970, joined by colons; None: no waiting.
    """
    if given is None:
        yield
        return
    folder, count, until = given.rsplit(":", 2)
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, f"{os.getpid()}.started").touch()
    enough = math.inf if count == "never" else int(count)
    while len(list(Path(folder).glob("*.started"))) < enough and time.time() < float(until):
        time.sleep(0.2)
    with Path(folder, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def speed(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    decode = []
    for index, (batch, length) in enumerate(_sizes(options.points)):
        engine.steps(batch, min(length, 64), 6, 10 * index + 2)
        rows = engine.steps(batch, length, options.steps, 10 * index + 1)
        decode.append({"batch": batch, "tokens": length, **decode_figures(rows, batch)})
        print(json.dumps(decode[-1]), flush=True)
    prompts = []
    for index, (batch, length) in enumerate(_sizes(options.prefill)):
        taken = [sum(row[0] for row in engine.steps(batch, length, 1, 5000 + 10 * index + n)) for n in range(3)]
        prompts.append({"batch": batch, "tokens": length, "s": round(min(taken[1:]), 4)})
    return {"decode": decode, "prefill": prompts}


def decode_figures(rows: Sequence[tuple[float, int, int]], batch: int) -> dict[str, Any]:
    """Of steps that give every request one token: p50 and p99 in ms; tokens a second of the whole run."""
    whole = sum(row[1] for row in rows) / sum(row[0] for row in rows)
    full = [1e3 * seconds for seconds, new, requests in rows if new == requests == batch]
    full = sorted(full[3:-2])
    if not full:
        return {"steps": len(rows), "tokens_per_s_whole": round(whole, 1)}
    return {
        "steps": len(rows),
        "step_ms_p50": round(statistics.median(full), 4),
        "step_ms_p99": round(full[min(len(full) - 1, int(0.99 * len(full)))], 4),
        "tokens_per_s_whole": round(whole, 1),
    }


def numbers(engine: Engine, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Errors of the attention layers alone, on what they are given while the engine serves."""
    windows = {id(layer.impl): getattr(layer, "sliding_window", None) for layer in engine.layers}
    implementation, rows = type(engine.layers[0].impl), []
    latent = hasattr(implementation, "forward_mqa")
    name = "forward_mqa" if latent else "forward"
    plain = getattr(implementation, name)

    def compare(step: str, window: int | None, got: Tensor, want: Tensor) -> None:
        error, rounding = (got - want).abs(), (want.bfloat16() - want).abs()
        figures = [float(figure) for figure in (error.max(), error.mean(), rounding.max(), rounding.mean())]
        rows.append((step, window, figures))

    def forward(
        self: Any, layer: Any, query: Tensor, key: Any, value: Any, cache: Tensor, step: Any, output: Any, **more: Any
    ) -> Any:
        given = query.clone()
        result = plain(self, layer, query, key, value, cache, step, output, **more)
        if step is not None and not torch.cuda.is_current_stream_capturing():
            want = float64_attention(
                given[: step.num_actual_tokens].view(step.num_actual_tokens, -1, self.head_size),
                *_halves(cache, self.head_size),
                *(step.block_table, step.seq_lens.tolist(), step.query_start_loc.tolist()),
                scale=self.scale,
                window=windows[id(self)],
                softcap=getattr(self, "_softcap", None) or getattr(self, "logits_soft_cap", None),
                sinks=self.sinks,
                cache_scales=cache_scales(layer, cache),
            )
            got = result[: want.shape[0]].view_as(want)
            longest = step.max_query_len
            kind = "decode" if longest == 1 else "speculative" if longest <= engine.queries else "prompts"
            compare(kind, windows[id(self)], got, want)
        return result

    def forward_mqa(self: Any, query: Any, cache: Tensor, step: Any, layer: Any) -> Any:
        given = torch.cat(query, dim=-1) if isinstance(query, tuple) else query.clone()
        result = plain(self, query, cache, step, layer)
        if not torch.cuda.is_current_stream_capturing():
            lens, tokens = step.decode.seq_lens.tolist(), given.shape[0]
            want = float64_attention(
                given,
                *(cache[:, :, None], cache[:, :, None, : self.kv_lora_rank]),
                *(step.decode.block_table, lens, list(range(0, tokens + 1, tokens // len(lens)))),
                scale=self.scale,
            )
            compare("decode" if tokens == len(lens) else "speculative", None, result[0], want)
        return result

    setattr(implementation, name, forward_mqa if latent else forward)
    try:
        engine.generate([engine.prompt(length, 7000 + i) for i, length in enumerate(PROMPTS)], 4 * engine.queries**2)
    finally:
        setattr(implementation, name, plain)
    result = []
    for step, window in sorted({row[:2] for row in rows}, key=str):
        kept = [row[2] for row in rows if row[:2] == (step, window)]
        names = ("max_error", "mean_error", "max_rounding", "mean_rounding")
        merged = (
            max(row[i] for row in kept) if i % 2 == 0 else statistics.mean(row[i] for row in kept) for i in range(4)
        )
        result.append({"step": step, "window": window, "layers": len(kept), **dict(zip(names, merged, strict=True))})
    return result


def cache_scales(layer: Any, cache: Tensor) -> tuple[float, float] | None:
    """Factors of the keys and values of a cache in float8 e4m3; None for another cache."""
    return (float(layer._k_scale), float(layer._v_scale)) if cache.dtype.itemsize == 1 else None


def _halves(cache: Tensor, width: int) -> tuple[Tensor, ...]:
    """Keys and values ``[B, N, H, D]`` of vLLM's cache in either form."""
    return cache.unbind(1) if cache.ndim == 5 else cache.transpose(1, 2).split(width, dim=-1)


def float64_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Sequence[int],
    starts: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cache_scales: tuple[float, float] | None = None,
) -> Tensor:
    """Causal attention of ragged queries ``[T, H, D]`` over pages in float64; `window` is in tokens.

    Args:
        cache_scales: of keys and values, if the caches' bytes are those of float8 e4m3.
    """

    def gathered(cache: Tensor, pages: Tensor, factor: float | None) -> Tensor:
        if factor is None:
            return cache[pages].flatten(0, 1).double()
        return cache.view(torch.uint8)[pages].flatten(0, 1).view(torch.float8_e4m3fn).double() * factor

    factors = cache_scales or (None, None)
    out = torch.zeros(*q.shape[:-1], v_cache.shape[-1], dtype=torch.float64, device=q.device)
    heads = k_cache.shape[2]
    for sequence, length in enumerate(seq_lens):
        first, last = starts[sequence : sequence + 2]
        pages = block_table[sequence, : -(-length // k_cache.shape[1])].long()
        keys, values = (
            gathered(cache, pages, factor)[:length].repeat_interleave(q.shape[1] // heads, dim=1)
            for cache, factor in zip((k_cache, v_cache), factors, strict=True)
        )
        scores = torch.einsum("qhd,khd->hqk", q[first:last].double(), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length - (last - first), length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)
        hidden = (key > at) if window is None else (key > at) | (key <= at - window)
        scores.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            more = sinks.double()[:, None, None].expand(-1, last - first, 1)
            scores = torch.cat([scores, more], dim=-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], values)
    return out


def tokens(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """The best token after each token of given prompts, and the given one's log-probability; greedy decode."""
    outputs = engine.generate([engine.prompt(n, 2000 + i) for i, n in enumerate(TAUGHT)], 1, prompt_logprobs=1)
    best, given = [], []
    for output in outputs:
        for token, ranked in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=False):
            best.append(max(ranked, key=lambda other: ranked[other].logprob))
            given.append(round(float(ranked[token].logprob), 5))
    prompts = [engine.prompt(length, 3000 + i) for i, length in enumerate(CONTINUED)]
    outputs = [output.outputs[0] for output in engine.generate(prompts, 200, logprobs=0)]
    greedy = [list(output.token_ids) for output in outputs]
    picked = [
        [round(float(ranked[token].logprob), 5) for token, ranked in zip(row.token_ids, row.logprobs, strict=True)]
        for row in outputs
    ]
    own = zip(prompts, greedy, strict=True)
    copied = statistics.mean(token in prompt["prompt_token_ids"] for prompt, ids in own for token in ids)
    found = {"best": best, "logprobs": given, "greedy": greedy, "greedy_logprobs": picked}
    return found | {"copied_share": round(copied, 4)}


def stress(engine: Engine, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Requests that are served twice: long ones, many, some with the same beginning."""
    common = engine.prompt(700, 8200)["prompt_token_ids"]
    tails = [engine.prompt(50 + i, 8300 + i)["prompt_token_ids"] for i in range(32)]
    loads = {
        "1000 steps of 8": ([engine.prompt(200, 8000 + i) for i in range(8)], 1000),
        "64 of mixed lengths": ([engine.prompt(64 + 37 * i, 8100 + i) for i in range(64)], 150),
        "32 with one prefix": ([{"prompt_token_ids": common + tail} for tail in tails], 100),
    }
    scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    plain, preempted = scheduler._preempt_request, [0]

    def preempt(self: Any, *given: Any, **named: Any) -> Any:
        preempted[0] += 1
        return plain(self, *given, **named)

    scheduler._preempt_request = preempt
    found = []
    try:
        for name, (prompts, count) in loads.items():
            preempted[0] = 0
            first, second = (
                [list(output.outputs[0].token_ids) for output in engine.generate(prompts, count)] for _ in range(2)
            )
            assert all(len(row) == count for row in first + second)
            same = sum(x == y for a, b in zip(first, second, strict=True) for x, y in zip(a, b, strict=True))
            share = round(same / (count * len(prompts)), 5)
            found.append({"load": name, "preempted": preempted[0], "same_share": share})
    finally:
        scheduler._preempt_request = plain
    return found


def watch(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Python's time in kernelhub's calls, waits for the GPU in them, and kernels compiled since the start.

    A wait is an operation that torch's sync debug mode refuses: the call is counted and made again without the mode.
    """
    implementation = type(engine.layers[0].impl)
    module = importlib.import_module(implementation.__module__)
    builder = next(
        kind
        for name, kind in vars(module).items()
        if name.endswith("MetadataBuilder") and kind.__module__ == module.__name__
    )
    names = [
        (implementation, name)
        for name in ("forward", "forward_mqa", "do_kv_cache_update")
        if name in vars(implementation)
    ]
    names += [(builder, "build")] if "build" in vars(builder) else []
    seconds: dict[str, dict[str, list[float]]] = {name: {} for _, name in names}
    waits: list[str] = []
    load = ["none"]

    def watched(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            if load[0] == "waits":
                return unwaiting(*given, **named)
            began = time.perf_counter()
            result = plain(*given, **named)
            seconds[name].setdefault(load[0], []).append(time.perf_counter() - began)
            return result

        def unwaiting(*given: Any, **named: Any) -> Any:
            seconds[name].setdefault("waits", []).append(0.0)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return plain(*given, **named)
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                waits.append(f"{name}: {error}"[:300])
            finally:
                torch.cuda.set_sync_debug_mode("default")
            return plain(*given, **named)

        return timed

    compiled: list[str] = []
    with _compilations(compiled):
        plain = {(kind, name): getattr(kind, name) for kind, name in names}
        for (kind, name), function in plain.items():
            setattr(kind, name, watched(name, function))
        try:
            for load[0], prompts, count in (
                ("waits", [engine.prompt(64 + 24 * i, 8100 + i) for i in range(64)], 100),
                ("decode of 1", [engine.prompt(1000, 9001)], 60),
                ("decode of 16", [engine.prompt(1000, 9100 + i) for i in range(16)], 60),
            ):
                engine.generate(prompts, count)
        finally:
            for (kind, name), function in plain.items():
                setattr(kind, name, function)
    layers = len(engine.layers)
    found = {
        name: {
            at: {
                "calls": len(taken),
                "us_p50": round(1e6 * statistics.median(taken), 2),
                "us_min": round(1e6 * min(taken), 2),
            }
            for at, taken in loads.items()
            if at != "waits"
        }
        for name, loads in seconds.items()
    }
    watched_calls = {name: len(loads.get("waits", [])) for name, loads in seconds.items()}
    return {"layers": layers, "host": found, "watched_calls": watched_calls, "waits": waits, "compiled": compiled}


def writes(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """The cache written by vLLM's kernel and by kernelhub's, alone and, in eager steps, while the engine serves."""
    found: dict[str, Any] = {"alone": written_bytes(engine, options)}
    if not options.eager:
        return found
    prompts = [engine.prompt(length, 3000 + i) for i, length in enumerate(CONTINUED)]
    greedy: dict[str, Any] = {}
    for writer in ("vllm", "kernelhub", "kernelhub", "vllm"):
        _write_by(engine, writer)
        outputs = [output.outputs[0] for output in engine.generate(prompts, 100, logprobs=0)]
        ids = [list(output.token_ids) for output in outputs]
        logprobs = [
            [float(ranked[token].logprob) for token, ranked in zip(row.token_ids, row.logprobs, strict=True)]
            for row in outputs
        ]
        steps = []
        for index, (batch, length) in enumerate(_sizes(options.points)):
            rows = engine.steps(batch, length, options.steps, 10 * index + 1)
            steps.append({"batch": batch, "tokens": length, **decode_figures(rows, batch)})
        greedy.setdefault(writer, []).append((ids, logprobs))
        found.setdefault("steps", []).append({"writer": writer, "decode": steps})
        print(json.dumps(found["steps"][-1]), flush=True)
    first = greedy["vllm"][0]
    found["greedy tokens"] = {
        name: {
            "same_share": statistics.mean(
                x == y for a, b in zip(first[0], other[0], strict=True) for x, y in zip(a, b, strict=True)
            ),
            "logprob_max": max(
                abs(x - y) for a, b in zip(first[1], other[1], strict=True) for x, y in zip(a, b, strict=True)
            ),
        }
        for name, other in (
            ("kernelhub", greedy["kernelhub"][0]),
            ("kernelhub again", greedy["kernelhub"][1]),
            ("vllm again", greedy["vllm"][1]),
        )
    }
    for writer in ("vllm", "kernelhub"):
        _write_by(engine, writer)
        found[f"watch, {writer}"] = watch(engine, options)
    return found


def hosts(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """What `watch` finds, with each writer of the KV cache in turn."""
    found = {}
    for turn, writer in enumerate(("kernelhub", "vllm", "kernelhub")):
        _write_by(engine, writer)
        found[f"{writer} writes" + " again" * (turn > 1)] = watch(engine, options)
        print(json.dumps(found), flush=True)
    return found


def written_bytes(engine: Engine, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Writes of a few sizes by both, without anything else."""
    with torch.inference_mode():
        return [_writes_of(engine, tokens) for tokens in WRITTEN]


def _write_by(engine: Engine, writer: str) -> None:
    """Let the layers write by vLLM's kernel or by kernelhub's."""
    for layer in engine.layers:
        layer.impl._writes = writer == "kernelhub"


def _writes_of(engine: Engine, tokens: int) -> dict[str, Any]:
    """A step's writes of so many tokens, of which every eighth is padding, by both."""
    layers = engine.layers
    impl, cache = layers[0].impl, layers[0].kv_cache
    page = impl._parts_of(cache)[2].shape[1]
    places = min(cache.shape[0] * page, 4 * tokens + page)
    draw = torch.Generator(device=cache.device).manual_seed(tokens)
    slots = torch.randperm(places, device=cache.device, generator=draw)[:tokens]
    slots[7::8] = -1
    widths = [heads * impl.head_size for heads in (impl.num_heads, impl.num_kv_heads, impl.num_kv_heads)]
    projected = torch.randn(tokens + 3, sum(widths), device=cache.device, generator=draw).to(torch.bfloat16)
    _, keys, values = (part.unflatten(1, (-1, impl.head_size)) for part in projected.split(widths, dim=1))

    def write(layer: Any) -> None:
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

    def write_all() -> None:
        for layer in layers:
            write(layer)

    blocks = -(-places // page)
    written, row = [], {"tokens": tokens, "padded": int((slots < 0).sum())}
    for writer in ("vllm", "kernelhub"):
        _write_by(engine, writer)
        cache.zero_()
        write(layers[0])
        written.append(cache[:blocks].contiguous().view(torch.uint8).clone())
        for _ in range(12):
            write_all()
        taken = []
        for _ in range(50):
            torch.cuda.synchronize()
            began = time.perf_counter()
            write_all()
            taken.append(time.perf_counter() - began)
        row[f"{writer}, host us"] = round(1e6 * min(taken) / len(layers), 2)
        row[f"{writer}, graph us"] = round(_graph_us(write_all) / len(layers), 3)
    cache.zero_()
    row["same_bytes"] = torch.equal(*written)
    row["written_share"] = round(float((written[0] != 0).float().mean()), 4)
    print(json.dumps(row), flush=True)
    return row


def _graph_us(call: Callable[[], None], replays: int = 20) -> float:
    """Microseconds of the GPU for a call's launches as a CUDA graph, the least of several rows of replays."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    least = math.inf
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        least = min(least, begin.elapsed_time(end))
    return 1e3 * least / replays


@contextmanager
def _compilations(found: list[str]) -> Iterator[None]:
    """Collect the names of Triton kernels that are compiled meanwhile, kernelhub's and others'."""
    knobs = importlib.import_module("triton").knobs
    before = knobs.runtime.jit_post_compile_hook

    def note(*given: Any, **named: Any) -> None:
        function = named.get("fn")
        found.append(f"{getattr(function, 'module', '')}.{getattr(function, 'name', named.get('repr'))}"[:120])

    knobs.runtime.jit_post_compile_hook = note
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook = before


def facts_of(engine: Engine) -> dict[str, Any]:
    config = engine.llm.llm_engine.vllm_config
    report = importlib.import_module("kernelhub").report()
    calls: Counter[tuple[str, str]] = Counter()
    for row in report.rows:
        calls[row.op, row.kernel] += row.calls
    return {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "layers": sorted({f"{type(layer.impl).__module__}.{type(layer.impl).__qualname__}" for layer in engine.layers}),
        "cache_blocks": config.cache_config.num_gpu_blocks,
        "memory_gib": round(torch.cuda.memory_reserved() / 2**30, 2),
        "errors_of_kernelhub": engine.errors,
        "kernels": sorted({row.kernel for row in report.rows}),
        "linear": engine.linear,
        "calls": {f"{op} {kernel}": calls for (op, kernel), calls in sorted(calls.items())},
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    engine = Engine(options)
    calls: dict[str, Callable[..., Any]] = {"speed": speed, "numbers": numbers, "tokens": tokens, "stress": stress}
    calls |= {"watch": watch, "hosts": hosts, "writes": writes, "bytes": written_bytes}
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "start_s": round(engine.start_s, 2)}
    result["options"] = {name: str(value) for name, value in vars(options).items() if name not in ("out", "show")}
    for part in filter(None, options.early.split(",")):
        result[part] = calls[part](engine, options)
    with turn(options.turns):
        for part in options.parts.split(","):
            result[part] = calls[part](engine, options)
    return result | facts_of(engine)


def show(runs: dict[str, Any]) -> str:
    """Tables of the runs: starts, decode, prompts, errors, agreement."""
    lines = ["run | start, s | ms a decode step, p50 (p99), tokens/s of the whole run"]
    for tag, row in runs.items():
        if "options" not in row:
            continue  # of another benchmark, in a file of several
        lines.append(f"{tag} | {row['start_s']}")
        lines += [
            f"    decode {at['batch']} x {at['tokens']}: {at.get('step_ms_p50')} ({at.get('step_ms_p99')}), "
            f"{at['tokens_per_s_whole']}"
            for at in row.get("speed", {}).get("decode", [])
        ]
        lines += [
            f"    prompts {at['batch']} x {at['tokens']}: {at['s']} s" for at in row.get("speed", {}).get("prefill", [])
        ]
        if "copied_share" in row.get("tokens", {}):
            lines.append(f"    greedy tokens that are in the prompt: {row['tokens']['copied_share']}")
        lines += [f"    {found}" for part in ("numbers", "stress", "bytes") for found in row.get(part, [])]
        of_parts = [item for part in ("watch", "hosts", "writes") for item in row.get(part, {}).items()]
        lines += [f"    {name}: {value}" for name, value in of_parts]
        lines += [f"    {name}: {row[name]}" for name in ("linear", "calls") if row.get(name)]
        if row["errors_of_kernelhub"]:
            lines.append(f"    errors: {row['errors_of_kernelhub']}")
    told = {tag: row["tokens"] for tag, row in runs.items() if "best" in row.get("tokens", {})}
    for one in told:
        for other in told:
            if one < other and _weights(runs[one]) == _weights(runs[other]):
                lines.append(f"{one}, {other}: {agreement(told[one], told[other])}")
    return "\n".join(lines)


def _weights(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["options"]["model"], run["options"].get("float4", "None")


def agreement(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Share of positions with the same best token; differences of log-probabilities; the same of greedy decode.

    Log-probabilities of greedy decode are compared up to the first token that differs, as their contexts are the same
    up to there.
    """
    same = [x == y for x, y in zip(one["best"], other["best"], strict=True)]
    apart = [abs(x - y) for x, y in zip(one["logprobs"], other["logprobs"], strict=True)]
    found = {
        "same_best_share": round(statistics.mean(same), 5),
        "logprob_max": round(max(apart), 4),
        "logprob_mean": round(statistics.mean(apart), 5),
    }
    if "greedy" not in one or "greedy" not in other:
        return found
    equal, apart = [], []
    for row in range(len(one["greedy"])):
        alike = [x == y for x, y in zip(one["greedy"][row], other["greedy"][row], strict=True)]
        shared = alike.index(False) if False in alike else len(alike)
        equal += alike
        apart += [
            abs(x - y)
            for x, y in zip(one["greedy_logprobs"][row][:shared], other["greedy_logprobs"][row][:shared], strict=True)
        ]
    return found | {
        "same_greedy_share": round(statistics.mean(equal), 5),
        "greedy_logprob_max": round(max(apart, default=0.0), 4),
        "greedy_logprob_mean": round(statistics.mean(apart), 5) if apart else 0.0,
    }


def _sizes(text: str) -> list[tuple[int, int]]:
    return [(int(batch), int(length)) for batch, _, length in (item.partition("x") for item in text.split(",") if item)]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    runs = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    if not options.show:
        tag = options.tag or f"{options.model.name}-{options.backend}{'-eager' * options.eager}"
        runs[tag] = run(options)
        if options.out:
            options.out.write_text(json.dumps(runs, indent=1))
        runs = {tag: runs[tag]}
    print(show(runs))


if __name__ == "__main__":
    main()
