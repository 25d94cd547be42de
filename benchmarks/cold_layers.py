"""What a layer of an engine keeps the host in an eager decode step, where other code runs between the layers.

    python benchmarks/cold_layers.py [--form FORM ...] [--tokens N] [--megabytes N] [--against CHECKOUT] [--json]

A call in a loop finds its code and data in the near caches and its branches predicted. In an engine hundreds of
microseconds of other Python and C++ come between the attention of two layers. Here such code runs between the calls,
too: operators of torch, modules of Python's library, and a copy of `--megabytes`. Without a GPU a stub takes the place
of the driver (see `host_stub`), so what the driver takes is missing. Forms:

    vllm    `forward` of kernelhub's attention layer of vLLM, whose own modules are stand-ins
    mla     `forward_mqa` of the layer of latent attention
    write   `do_kv_cache_update` of that layer, by `write_kv_cache`
    call    `paged_attention` with the tensors that `forward` gives it
    empty   a function that returns its last argument

Each is called warm, with nothing between the calls, and cold: nanoseconds, the median of calls of 32 layers in turn,
with queries and destinations that are new in each call. They only compare two versions on one machine. `--against`
measures another checkout as well, in the order before, after, after, before, and prints after over before.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import itertools
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from calls import _on_gpu
from host_stub import install_stub

HEADS, KV_HEADS, WIDTH = 32, 8, 128
LATENT_HEADS, LATENT, ROTARY = 16, 512, 64
PAGE, PAGES = 16, 64
SKIPPED, STEPS = 10, 40
Steps = Callable[[], Iterable[Callable[[], Any]]]


def attention_layers(tokens: int, layers: int, form: str) -> Steps:
    """Calls of `forward` of dense attention, of its write to the cache, or of the op that it calls."""
    import kernelhub

    module = importlib.import_module("kernelhub.compat.vllm.attention")
    made = []
    for _ in range(layers):
        impl = module.KernelhubImpl(HEADS, WIDTH, WIDTH**-0.5, KV_HEADS)
        impl._writes = True
        cache = torch.empty(tokens * PAGES, PAGE, KV_HEADS, 2 * WIDTH, dtype=torch.bfloat16).transpose(1, 2)
        made.append((types.SimpleNamespace(impl=impl, _k_scale=None, _v_scale=None), cache))
    table, lengths, starts, slots = metadata_of(tokens)
    builder = module.KernelhubMetadataBuilder(None, [], None, torch.device("cpu"))

    def step() -> Iterator[Callable[[], Any]]:
        common = types.SimpleNamespace(
            num_actual_tokens=tokens,
            num_reqs=tokens,
            max_query_len=1,
            query_start_loc=starts[:],
            seq_lens=lengths[:],
            block_table_tensor=table[:],
            slot_mapping=slots[:],
            causal=True,
        )
        metadata = builder.build(0, common)
        for layer, cache in made:
            qkv = torch.empty(tokens, (HEADS + 2 * KV_HEADS) * WIDTH, dtype=torch.bfloat16)
            parts = qkv.split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], dim=-1)
            q, keys, values = (part.view(-1, part.shape[1] // WIDTH, WIDTH) for part in parts)
            out = torch.empty(tokens, HEADS * WIDTH, dtype=torch.bfloat16).view(-1, HEADS, WIDTH)
            if form == "vllm":
                given = layer, q, None, None, cache, metadata
                yield functools.partial(layer.impl.forward, *given, output=out)
            elif form == "write":
                yield functools.partial(layer.impl.do_kv_cache_update, layer, keys, values, cache, common.slot_mapping)
            else:
                given = q, *layer.impl._parts_of(cache)[2:], metadata.block_table, metadata.seq_lens
                yield functools.partial(kernelhub.paged_attention, *given, scale=layer.impl.scale, out=out)

    return step


def latent_layers(tokens: int, layers: int, form: str) -> Steps:
    """Calls of `forward_mqa` of latent attention."""
    module = importlib.import_module("kernelhub.compat.vllm.mla")
    names = "alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name"
    given: dict[str, Any] = {
        "attn_type": module.AttentionType.DECODER,
        "kv_cache_dtype": "auto",
        "kv_lora_rank": LATENT,
    }
    given |= dict.fromkeys(names)
    made = []
    for _ in range(layers):
        impl = module.KernelhubMlaImpl(LATENT_HEADS, LATENT + ROTARY, 0.1, 1, **given)
        cache = torch.empty(tokens * PAGES, PAGE, LATENT + ROTARY, dtype=torch.bfloat16)
        made.append((types.SimpleNamespace(impl=impl), cache))
    table, lengths, _, _ = metadata_of(tokens)

    def step() -> Iterator[Callable[[], Any]]:
        decode = types.SimpleNamespace(block_table=table[:], seq_lens=lengths[:])
        metadata = types.SimpleNamespace(causal=True, decode=decode)
        for layer, cache in made:
            q = torch.empty(tokens, LATENT_HEADS, LATENT + ROTARY, dtype=torch.bfloat16)
            yield functools.partial(layer.impl.forward_mqa, q, cache, metadata, layer)

    return step


def empty_calls(tokens: int, layers: int, form: str) -> Steps:
    """Calls of nothing."""
    return lambda: (functools.partial(lambda *given: given[-1], *range(6)) for _ in range(layers))


def metadata_of(tokens: int) -> tuple[torch.Tensor, ...]:
    """Block table, lengths, offsets of queries and slots of a step."""
    table = torch.arange(tokens * PAGES, dtype=torch.int32).view(tokens, PAGES)
    lengths = torch.full((tokens,), PAGES * PAGE, dtype=torch.int32)
    return table, lengths, torch.arange(tokens + 1, dtype=torch.int32), torch.arange(tokens, dtype=torch.int64)


FORMS = {
    "vllm": attention_layers,
    "write": attention_layers,
    "mla": latent_layers,
    "call": attention_layers,
    "empty": empty_calls,
}


class Others:
    """In the place of what an engine runs between the attention of two layers."""

    def __init__(self, megabytes: float) -> None:
        self._from = torch.zeros(int(megabytes * (1 << 20)) // 2 + 64, dtype=torch.uint8, device="cpu")
        self._to = torch.empty_like(self._from)
        self._source = Path(ast.__file__).read_text()[:6000].rpartition("\ndef ")[0]
        self._pattern = re.compile(r"(\w+)\s*=\s*(\w+)\(([^)]*)\)")
        self._document = json.dumps({f"layer.{at}.weight": [at, at * 0.5, str(at)] for at in range(40)})
        self._a, self._w, self._norm = (torch.randn(shape, device="cpu") for shape in ((4, 64), (64, 64), (64,)))

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


def measure(form: str, tokens: int, layers: int, others: Callable[[], None] | None) -> list[float]:
    """Nanoseconds of each call."""
    step, found, clock = FORMS[form](tokens, layers, form), [], time.perf_counter_ns
    synchronize: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for at in range(SKIPPED + STEPS):
        synchronize()  # the GPU's queue never fills
        for call in step():
            if others is not None:
                others()
            began = clock()
            call()
            ended = clock()
            if at >= SKIPPED:
                found.append(float(ended - began))
    return found


def vllm_stand_ins() -> None:
    """Modules in the place of vLLM's, with what kernelhub's layer imports."""
    logging.disable(logging.WARNING)  # that this vLLM has no worker
    attention, worker = ("vllm.model_executor", "layers", "attention", "mla_attention"), "vllm.v1.worker.gpu_worker"
    names = ["vllm", "vllm._custom_ops", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend", "vllm.v1.worker"]
    names += [worker, *itertools.accumulate(attention, "{}.{}".format)]
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
    latent: Any = sys.modules[names[-1]]
    latent.QueryLenSupport = Enum("QueryLenSupport", ["UNIFORM"])
    latent.MLACommonBackend, latent.MLACommonMetadataBuilder = (
        backend.AttentionBackend,
        backend.AttentionMetadataBuilder,
    )
    latent.MLACommonImpl = type("MLACommonImpl", (), {"__init__": _latent})


def _latent(
    self: Any, num_heads: int, head_size: int, scale: float, *given: Any, kv_lora_rank: int, **named: Any
) -> None:
    self.scale, self.kv_lora_rank = scale, kv_lora_rank


def here(forms: tuple[str, ...], tokens: int, layers: int, megabytes: float) -> dict[str, dict[str, float]]:
    """Nanoseconds of each form, warm and cold."""
    import kernelhub

    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.set_default_device("cuda")
    else:
        install_stub(late=True)
    vllm_stand_ins()
    kernelhub.configure(paged_attention="triton", mla_attention="triton", write_kv_cache="triton")
    others, found = Others(megabytes), {}
    with contextlib.ExitStack() as stack:
        for op in (kernelhub.paged_attention, kernelhub.mla_attention, kernelhub.write_kv_cache):
            stack.enter_context(_on_gpu(op.op))
        stack.enter_context(torch.inference_mode())
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
