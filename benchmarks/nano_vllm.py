"""nano-vllm, unchanged, with its attention served by kernelhub.

    git clone https://github.com/GeeeekExplorer/nano-vllm
    python benchmarks/nano_vllm.py --checkout nano-vllm --model Qwen3-0.6B --requests 256
    python benchmarks/nano_vllm.py --checkout nano-vllm --model Qwen3-0.6B --check

nano-vllm calls two functions of flash-attn. `kernelhub.compat.flash_attn` has them, so it takes the place of that
package before nano-vllm is imported. A folder without *.safetensors gets seeded random weights.

Without --check: the load of nano-vllm's own benchmark, prompts and outputs of 100 to 1024 random tokens, in CUDA
graphs. With --check: the same prompts by the kernels that kernelhub selects and by torch's, eagerly; and the share of
equal tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch

import kernelhub
from kernelhub.compat import flash_attn

LENGTHS = (100, 1024)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", type=Path, required=True, help="folder of nano-vllm's repository")
    parser.add_argument("--model", type=Path, required=True, help="folder of config.json, tokenizer, perhaps weights")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--check", action="store_true", help="compare with torch's kernels")
    return parser.parse_args()


def start(options: argparse.Namespace) -> Any:
    """nano-vllm's engine, through kernelhub."""
    sys.modules["flash_attn"] = flash_attn
    sys.path.insert(0, str(options.checkout))
    from nanovllm import LLM  # type: ignore[import-not-found]

    engine = LLM(str(options.model), enforce_eager=options.check, max_model_len=4096)
    if not any(options.model.glob("*.safetensors")):
        draw_weights(engine.model_runner.model)
    return engine


@torch.inference_mode()
def draw_weights(model: torch.nn.Module) -> None:
    """normal(0, 0.02), norms 1, each seeded with its name."""
    for name, weight in model.named_parameters():
        generator = torch.Generator(device=weight.device)
        generator.manual_seed(zlib.crc32(name.encode()))
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
    with kernelhub.use(backend="torch"):
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
