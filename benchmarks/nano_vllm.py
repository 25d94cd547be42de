"""nano-vllm, unchanged, with its attention served by kernelhub.

    git clone https://github.com/GeeeekExplorer/nano-vllm
    python benchmarks/nano_vllm.py --checkout nano-vllm --model Qwen3-0.6B --requests 256
    python benchmarks/nano_vllm.py --checkout nano-vllm --model Qwen3-0.6B --requests 256 --steps
    python benchmarks/nano_vllm.py --checkout nano-vllm --model Qwen3-0.6B --check
    python benchmarks/nano_vllm.py --checkout nano-vllm --model Qwen3-0.6B --ranks 2

nano-vllm calls two functions of flash-attn. `kernelhub.compat.flash_attn` has them, so it takes the place of that
package before nano-vllm is imported. With --steps the layers' `forward` is replaced, too: a plan checks a step's
metadata once, for all layers. With --ranks, tensor parallelism, `kernelhub.all_reduce` takes the place of torch's, by
the name `dist` in nano-vllm's layers. A folder without *.safetensors gets seeded random weights.

Without --check: the load of nano-vllm's own benchmark, prompts and outputs of 100 to 1024 random tokens, in CUDA
graphs. With --check: the same prompts by the kernels that kernelhub selects and by torch's, eagerly; and the share of
equal tokens.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import kernelhub
from kernelhub.compat import flash_attn

LENGTHS = (100, 1024)
RANKS = "NANO_VLLM_RANKS"  # variable by which nano-vllm's other ranks get what this process was given


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", type=Path, required=True, help="folder of nano-vllm's repository")
    parser.add_argument("--model", type=Path, required=True, help="folder of config.json, tokenizer, perhaps weights")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, of tensor parallelism")
    parser.add_argument("--steps", action="store_true", help="plans that check metadata once a step")
    parser.add_argument("--check", action="store_true", help="compare with torch's kernels")
    return parser.parse_args()


def start(options: argparse.Namespace) -> Any:
    """nano-vllm's engine, through kernelhub."""
    given = str(options.checkout.resolve()), options.steps
    os.environ[RANKS] = json.dumps(given)
    through_kernelhub(*given)
    from nanovllm import LLM  # type: ignore[import-not-found]

    return LLM(str(options.model), enforce_eager=options.check, max_model_len=4096, tensor_parallel_size=options.ranks)


def through_kernelhub(checkout: str, by_steps: bool) -> None:
    """Let nano-vllm of this process call kernelhub for attention and sums over ranks; draw weights that are missing."""
    sys.modules["flash_attn"] = flash_attn
    sys.path.insert(0, checkout)
    if by_steps:
        attend_by_steps(importlib.import_module("nanovllm.layers.attention"))
    for name in ("linear", "embed_head"):
        sum_by_kernelhub(importlib.import_module(f"nanovllm.layers.{name}"))
    runner = importlib.import_module("nanovllm.engine.model_runner")
    plain = runner.load_model

    def load_model(model: torch.nn.Module, path: str) -> None:
        if any(Path(path).glob("*.safetensors")):
            plain(model, path)
        else:
            draw_weights(model)

    runner.load_model = load_model


class Distributed:
    """torch.distributed as nano-vllm's layers use it, whose sums are kernelhub's.

    The first sum is in nano-vllm's warm-up, in which every rank takes part: there its plan finds out how the GPUs are
    connected, and makes the workspaces. It has a kernel for each size of message.
    """

    def __init__(self) -> None:
        self._plan: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, x: Tensor) -> None:
        if self._plan is None:
            self._plan = kernelhub.all_reduce.prepare(x, dist.group.WORLD)
        self._plan.run(x, out=x)


def sum_by_kernelhub(layers: Any) -> None:
    """Replace the name `dist` in a module of nano-vllm's layers."""
    layers.dist = Distributed()


class Steps:
    """The step of a plan that all layers share, for the context that nano-vllm makes for each of its steps."""

    def __init__(self) -> None:
        self.begun = 0
        self._plans: dict[Any, Any] = {}
        self._context: Any = None
        self._step: Any = None

    def of(self, context: Any, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """The step of `context`, begun at its first layer. k and v are the cache, or prompts without a prefix."""
        if context is not self._context:
            self._step, self._context = self._begin(context, scale, q, k, v), context
            self.begun += 1
        return self._step

    def _begin(self, context: Any, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Any:
        longest = {"max_seqlen_q": context.max_seqlen_q}
        if not context.is_prefill:
            given = context.block_tables, context.context_lens
            plan = self._plan("decode", lambda: kernelhub.paged_attention.prepare(q, k, v, *given, scale=scale))
            return plan.begin(*given)
        if context.block_tables is None:
            given = context.cu_seqlens_q, context.cu_seqlens_k
            longest |= {"max_seqlen_k": context.max_seqlen_k}
            prepare, rest = kernelhub.attention.prepare, {"causal": True, "scale": scale}
            plan = self._plan("prompts", lambda: prepare(q, k, v, *given, **longest, **rest))
            return plan.begin(*given, **longest)
        given = context.block_tables, context.cu_seqlens_k.diff(), context.cu_seqlens_q
        prepare = kernelhub.paged_attention.prepare
        plan = self._plan("prompts with a cached prefix", lambda: prepare(q, k, v, *given, **longest, scale=scale))
        return plan.begin(*given, **longest)

    def _plan(self, kind: str, prepare: Callable[[], Any]) -> Any:
        if kind not in self._plans:
            self._plans[kind] = prepare()
        return self._plans[kind]


def attend_by_steps(layers: Any) -> Steps:
    """Replace the `forward` of nano-vllm's attention layers; `layers` is its module `nanovllm.layers.attention`."""
    steps = Steps()

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context = layers.get_context()
        cached = self.k_cache.numel() > 0
        if cached:
            layers.store_kvcache(k, v, self.k_cache, self.v_cache, context.slot_mapping)
            if context.block_tables is not None:
                k, v = self.k_cache, self.v_cache
        return steps.of(context, self.scale, q, k, v).run(q, k, v)

    layers.Attention.forward = forward
    return steps


@torch.inference_mode()
def draw_weights(model: torch.nn.Module) -> None:
    """normal(0, 0.02), norms 1, each seeded with its name and rank.

    Equal shards would make the logits of two tokens equal, of which sampling takes either.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, weight in model.named_parameters():
        generator = torch.Generator(device=weight.device)
        generator.manual_seed(zlib.crc32(f"{name} {rank}".encode()))
        if weight.ndim == 1:
            weight.data.fill_(1.0)
        else:
            weight.data.normal_(0.0, 0.02, generator=generator)


def generate(engine: Any, prompts: list[list[int]], lengths: list[int], temperature: float) -> list[list[int]]:
    from nanovllm import SamplingParams

    sampling = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=count) for count in lengths]
    return [output["token_ids"] for output in engine.generate(prompts, sampling, use_tqdm=False)]


def check(engine: Any) -> dict[str, Any]:
    """Nearly greedy tokens of 16 prompts by both selections."""
    draw = random.Random(1)
    prompts = [[draw.randrange(10_000) for _ in range(draw.randint(5, 700))] for _ in range(16)]
    ours = generate(engine, prompts, [16] * 16, 1e-6)
    with kernelhub.use(attention="torch", paged_attention="torch"):  # in this rank
        theirs = generate(engine, prompts, [16] * 16, 1e-6)
    first = sum(a[0] == b[0] for a, b in zip(ours, theirs, strict=True))
    same = sum(x == y for a, b in zip(ours, theirs, strict=True) for x, y in zip(a, b, strict=True))
    return {"first_tokens_equal": f"{first} of 16", "tokens_equal": f"{same} of {16 * 16}"}


def benchmark(engine: Any, requests: int) -> dict[str, Any]:
    draw = random.Random(0)
    prompts = [[draw.randrange(10_000) for _ in range(draw.randint(*LENGTHS))] for _ in range(requests)]
    lengths = [draw.randint(*LENGTHS) for _ in range(requests)]
    generate(engine, prompts[:4], [8] * 4, 0.6)
    taken = []
    for _ in range(2):
        began = time.perf_counter()
        generate(engine, prompts, lengths, 0.6)
        taken.append(time.perf_counter() - began)
    total = sum(lengths)
    return {"output_tokens": total, "s": [round(s, 2) for s in taken], "tokens_per_s": round(total / min(taken), 1)}


def main() -> None:
    options = parse()
    engine = start(options)
    print(json.dumps(check(engine) if options.check else benchmark(engine, options.requests)))
    print(kernelhub.report())


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and RANKS in os.environ:  # another rank, which multiprocessing starts
    through_kernelhub(*json.loads(os.environ[RANKS]))
