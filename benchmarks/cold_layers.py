"""What a layer of an engine keeps the host in an eager decode step, where other code runs between the layers.

    python benchmarks/cold_layers.py [--form FORM ...] [--tokens N] [--megabytes N] [--against CHECKOUT] [--json]

A call in a loop finds its code and data in the near caches and its branches predicted. In an engine hundreds of
microseconds of other Python and C++ come between the attention of two layers. Here such code runs between the calls,
too: operators of torch, modules of Python's library, and a copy of `--megabytes`. No GPU is needed: a stub takes the
place of the driver (see `host_stub`), so what the driver takes is missing. Forms:

    vllm    `forward` of kernelhub's attention layer of vLLM, whose own modules are stand-ins
    call    `paged_attention` with the tensors that `forward` gives it
    empty   a function that returns its last argument

Each is called warm, with nothing between the calls, and cold: nanoseconds, the median of calls of 32 layers in turn,
with queries and destinations that are new in each call. They only compare two versions on one machine. `--against`
measures another checkout as well, in the order before, after, after, before, and prints after over before.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from calls import _on_gpu
from host_stub import install_stub

HEADS, KV_HEADS, WIDTH, PAGE, LENGTH = 32, 8, 128, 16, 1024
STEPS = 40
FORMS = ("vllm", "call", "empty")


def layers_of_vllm(count: int, tokens: int) -> Callable[[], list[tuple[Any, ...]]]:
    """A function that makes the metadata of a step; returns each layer with its cache and the metadata."""
    vllm_stand_ins()
    module = importlib.import_module("kernelhub.compat.vllm.attention")
    pages = LENGTH // PAGE
    layers = []
    for _ in range(count):
        impl = module.KernelhubImpl(HEADS, WIDTH, WIDTH**-0.5, KV_HEADS)
        cache = torch.empty(tokens * pages, PAGE, KV_HEADS, 2 * WIDTH, dtype=torch.bfloat16).transpose(1, 2)
        layers.append((types.SimpleNamespace(impl=impl, _k_scale=None, _v_scale=None), cache))
    table = torch.arange(tokens * pages, dtype=torch.int32).view(tokens, pages)
    lengths = torch.full((tokens,), LENGTH, dtype=torch.int32)
    starts, slots = torch.arange(tokens + 1, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int64)
    builder = module.KernelhubMetadataBuilder(None, [], None, torch.device("cpu"))

    def step() -> list[tuple[Any, ...]]:
        common = types.SimpleNamespace(
            num_actual_tokens=tokens,
            num_reqs=tokens,
            max_query_len=1,
            query_start_loc=starts[:],
            seq_lens=lengths[:],
            block_table_tensor=table[:],
            slot_mapping=slots,
            causal=True,
        )
        metadata = builder.build(0, common)
        return [(layer, cache, metadata) for layer, cache in layers]

    return step


def tensors_of(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q and out as vLLM's layer makes them: views of fresh tensors."""
    qkv = torch.empty(tokens, (HEADS + 2 * KV_HEADS) * WIDTH, dtype=torch.bfloat16)
    q = qkv.split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], dim=-1)[0].view(-1, HEADS, WIDTH)
    out = torch.empty(tokens, HEADS * WIDTH, dtype=torch.bfloat16).view(-1, HEADS, WIDTH)
    return q, out


class Others:
    """In the place of what an engine runs between the attention of two layers."""

    def __init__(self, megabytes: float) -> None:
        self._from = torch.zeros(int(megabytes * (1 << 20)) // 2 + 64, dtype=torch.uint8)
        self._to = torch.empty_like(self._from)
        self._source = Path(ast.__file__).read_text()[:6000].rpartition("\ndef ")[0]
        self._pattern = re.compile(r"(\w+)\s*=\s*(\w+)\(([^)]*)\)")
        self._document = json.dumps({f"layer.{at}.weight": [at, at * 0.5, str(at)] for at in range(40)})
        self._a, self._w, self._norm = torch.randn(4, 64), torch.randn(64, 64), torch.randn(64)

    def __call__(self) -> None:
        a = self._a
        for _ in range(3):
            a = torch.nn.functional.linear(a, self._w)
            a = torch.nn.functional.silu(a) * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-6) * self._norm
            first, second = a.chunk(2, -1)
            a = torch.cat([second, first], dim=-1).reshape(4, 64).contiguous()
        self._pattern.sub(r"\2", self._source[:2000])
        json.loads(self._document)
        ast.parse(self._source)
        "{:>10} {!r}".format("a", {"b": 1.5})
        self._to.copy_(self._from)


def measure(form: str, tokens: int, count: int, others: Callable[[], None] | None) -> list[float]:
    """Nanoseconds of each call."""
    import kernelhub

    step, found, clock = layers_of_vllm(count, tokens), [], time.perf_counter_ns
    if form == "empty":
        calls = [lambda *given: given[-1]] * count
    for at in range(STEPS + 10):
        for layer, (one, cache, metadata) in enumerate(step()):
            if others is not None:
                others()
            q, out = tensors_of(tokens)
            if form == "vllm":
                forward = one.impl.forward
                began = clock()
                forward(one, q, None, None, cache, metadata, output=out)
                ended = clock()
            elif form == "call":
                k, v = one.impl._parts_of(cache)[2:]
                scale, call = one.impl.scale, kernelhub.paged_attention
                began = clock()
                call(q, k, v, metadata.block_table, metadata.seq_lens, scale=scale, out=out)
                ended = clock()
            else:
                call = calls[layer]
                began = clock()
                call(one, q, None, None, cache, metadata, out)
                ended = clock()
            if at >= 10:
                found.append(float(ended - began))
    return found


def vllm_stand_ins() -> None:
    """Modules in the place of vLLM's, with what kernelhub's layer imports."""
    logging.disable(logging.WARNING)  # that this vLLM has no worker
    if "vllm" in sys.modules:
        return
    names = (
        "vllm", "vllm._custom_ops", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend", "vllm.v1.worker",
        "vllm.v1.worker.gpu_worker",
    )  # fmt: skip
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        sys.modules[name] = module
    sys.modules["vllm._custom_ops"].reshape_and_cache_flash = None  # type: ignore[attr-defined]
    backend: Any = sys.modules["vllm.v1.attention.backend"]
    backend.AttentionType = Enum("AttentionType", {"DECODER": "decoder"})
    backend.AttentionCGSupport = Enum("AttentionCGSupport", ["ALWAYS"])
    backend.MultipleOf = lambda base: base
    for name in ("AttentionBackend", "AttentionImpl", "AttentionMetadataBuilder"):
        setattr(backend, name, type(name, (), {"__init__": lambda self, *given, **named: None}))


def here(forms: tuple[str, ...], tokens: int, layers: int, megabytes: float) -> dict[str, dict[str, float]]:
    """Nanoseconds of each form, warm and cold."""
    import kernelhub

    torch.set_num_threads(1)
    install_stub()
    kernelhub.configure(paged_attention="triton")
    others, found = Others(megabytes), {}
    with _on_gpu(kernelhub.paged_attention.op), torch.inference_mode():
        for form in forms:
            warm, cold = (statistics.median(measure(form, tokens, layers, between)) for between in (None, others))
            found[form] = {"warm": warm, "cold": cold}
    return found


def against(before: Path, options: list[str]) -> dict[str, dict[str, float]]:
    """After over before, of the sums of two runs each."""
    after, runs = Path(__file__).parent.parent, []
    for folder in (before.resolve(), after, after, before.resolve()):
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        command = [sys.executable, str(folder / "benchmarks" / "cold_layers.py"), "--json", *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        runs.append(json.loads(done.stdout))
    first, second, third, fourth = runs
    return {
        form: {
            state: round((second[form][state] + third[form][state]) / (first[form][state] + fourth[form][state]), 2)
            for state in states
        }
        for form, states in second.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16, help="sequences of a step")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--megabytes", type=float, default=0.0, help="copied between two calls")
    parser.add_argument("--form", choices=FORMS, action="append", help="only this, may be repeated")
    parser.add_argument("--against", type=Path, help="a checkout of another version, to compare with")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    forms = tuple(options.form or FORMS)
    if options.against:
        given = ["--tokens", options.tokens, "--layers", options.layers, "--megabytes", options.megabytes]
        found = against(options.against, [*map(str, given), *[word for form in forms for word in ("--form", form)]])
    else:
        found = here(forms, options.tokens, options.layers, options.megabytes)
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"{'after / before' if options.against else 'ns':16}{'warm':>10}{'cold':>10}")
    for form, states in found.items():
        print(f"{form:16}{states['warm']:>10g}{states['cold']:>10g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
