"""Which tiles make `fused_moe`'s Triton kernel fastest on this GPU, for layers of real models: prints table entries.

    python scripts/measure_expert_tiles.py [--models NAME...] [--tokens N...] [--out FILE] [--seconds S]

First every candidate is compiled, by as many processes as there are cores; then all are timed in one process, the
first product's with the default second, then the second's with the best first. A candidate must be 2 % faster than the
default to be told, since that much is noise. What comes out belongs into `kernelhub/backends/triton/moe/tuned.py`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton

import kernelhub
from kernelhub.backends.triton.moe import tiles as defaults
from kernelhub.backends.triton.moe.candidates import candidates, heights
from kernelhub.backends.triton.moe.tuned import LAYER, Tiles, Tuned
from kernelhub.evidence.timing import time_calls
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.probes.device import facts

LAYERS = {  # ranks that share a layer
    "qwen3-30b-a3b": 1,
    "deepseek-v3.2": 8,
    "minimax-m2.5": 4,
    "gpt-oss-120b": 1,
}
TOKENS = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192)
_MARGIN = 0.98

Given = tuple[torch.Tensor, ...]  # tokens, weights of their experts, ids of those


def layer(model: str, tokens: int, device: torch.device) -> tuple[dict[str, Any], Any]:
    """A layer's arguments, and its plan."""
    arguments = moe_inputs(model, tokens=tokens, tensor_parallel=LAYERS[model], device=device)
    return arguments, kernelhub.fused_moe.prepare(**arguments, backend="triton")


def routed(arguments: dict[str, Any], tokens: int) -> Given:
    """The first tokens of a layer's arguments, in memory of their own."""
    return tuple(arguments[name][:tokens].clone() for name in ("x", "topk_weights", "topk_ids"))


def use(plan: Any, first: Tiles, second: Tiles, tokens: int) -> Tuned:
    """Have the plan's adapter take these tiles; the entry that says so, without times."""
    problem = plan.adapter.problem
    entry = Tuned(
        family=problem.device.family,
        **{name: getattr(problem, name) for name in LAYER},
        num_tokens=tokens,
        first=first,
        second=second,
        ms=0.0,
        default_ms=0.0,
        evidence=f"{problem.device.name}, Triton {triton.__version__}, {date.today().isoformat()}",
    )
    plan.adapter._measured = [entry]
    plan.adapter._rounds.clear()
    return entry


_HELD: dict[str, tuple[dict[str, Any], Any]] = {}  # in a process of the pool, the layer that it works on


def compile_one(job: tuple[str, Tiles, Tiles]) -> str | None:
    """Compile both products, in a process of a pool; what went wrong."""
    model, first, second = job
    if model not in _HELD:
        _HELD.clear()
        _HELD[model] = layer(model, 16, torch.device("cuda"))
    arguments, plan = _HELD[model]
    use(plan, first, second, 16)
    try:
        plan.run(*routed(arguments, 16))
        torch.cuda.synchronize()
    except (RuntimeError, triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError) as error:
        return f"{model} {first} / {second}: {type(error).__name__}: {str(error)[:100]}"
    return None


def jobs(model: str, tokens: list[int]) -> list[tuple[str, Tiles, Tiles]]:
    """Pairs of tiles that hold every candidate of both products once."""
    _, plan = layer(model, 1, torch.device("cuda"))
    problem, found = plan.adapter.problem, []
    for block_m in sorted({height for number in tokens for height in heights(problem, number)}):
        sides = [candidates(problem, block_m, gated) for gated in (True, False)]
        longest = max(map(len, sides))
        found += [(model, *(side[min(place, len(side) - 1)] for side in sides)) for place in range(longest)]
    return found


def fastest(
    plan: Any, pairs: list[tuple[Tiles, Tiles]], given: tuple[torch.Tensor, ...], budget_s: float
) -> list[float]:
    """Milliseconds of each pair of tiles; infinity of those that cannot run or are wrong."""
    tokens, device = len(given[0]), given[0].device
    use(plan, *pairs[0], tokens)
    want = plan.run(*given).float()
    times = []
    for pair in pairs:
        use(plan, *pair, tokens)
        try:
            apart = (plan.run(*given).float() - want).abs().max() / want.abs().max().clamp(min=1e-30)
        except triton.runtime.errors.OutOfResources:
            times.append(float("inf"))
            continue
        (timing,) = time_calls((lambda: plan.run(*given),), device, budget_s)
        times.append(1e3 * timing.median_s if float(apart) < 0.05 else float("inf"))
    return times


def best_of(model: str, tokens: list[int], budget_s: float, until: float) -> list[dict[str, Any]]:
    """For each number of tokens the fastest tiles, or the default ones where others are no faster than noise."""
    device = torch.device("cuda")
    arguments, plan = layer(model, max(tokens), device)
    problem, told = plan.adapter.problem, []
    for number in tokens:
        if time.monotonic() > until:
            print(f"{model}: no time left for {number} tokens", file=sys.stderr)
            continue
        given = routed(arguments, number)
        usual = defaults.choose(problem, number, ())
        pairs = [(usual.first, usual.second)]
        for block_m in heights(problem, number):
            second = candidates(problem, block_m, False)[0]
            pairs += [(tiles, second) for tiles in candidates(problem, block_m, True)]
        times = fastest(plan, pairs, given, budget_s)
        first = pairs[min(range(len(pairs)), key=times.__getitem__)][0]
        more = [(usual.first, usual.second)]
        more += [(first, tiles) for tiles in candidates(problem, first.block_m, False)]
        second_times = fastest(plan, more, given, budget_s)
        place = min(range(len(more)), key=second_times.__getitem__)
        close = [more[0], more[place]]
        again = [fastest(plan, close, given, 3 * budget_s) for _ in range(2)]
        usual_ms, best_ms = (min(column) for column in zip(*again, strict=True))
        print(f"{model} {number}: default {usual_ms:.3f} ms, {more[place][0]} / {more[place][1]} {best_ms:.3f} ms")
        place = place if best_ms < _MARGIN * usual_ms else 0
        entry = dataclasses.replace(
            use(plan, *more[place], number), ms=best_ms if place else usual_ms, default_ms=usual_ms
        )
        told.append(dataclasses.asdict(entry))
    return told


def written(entries: list[dict[str, Any]]) -> str:
    """JSON, a line per entry."""
    lines = []
    for entry in entries:
        tiles = {name: list(entry[name].values()) for name in ("first", "second")}
        times = {name: round(entry[name], 4) for name in ("ms", "default_ms")}
        lines.append(json.dumps(entry | tiles | times))
    return "[\n" + ",\n".join(lines) + "\n]\n"


def main() -> int:
    """Compile, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--out", type=Path, help="also write the entries to this file, as JSON")
    parser.add_argument("--sample", type=float, default=0.03, help="seconds that a candidate is timed for")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing new after so many")
    options = parser.parse_args()
    start = time.monotonic()
    until = start + options.seconds
    todo = [job for model in options.models for job in jobs(model, options.tokens)]
    print(f"{facts(torch.device('cuda'))}: {len(todo)} pairs of tiles to compile")
    torch.cuda.empty_cache()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), mp_context=context) as pool:
        failed = [problem for problem in pool.map(compile_one, todo) if problem]
    print(
        f"compiled, {time.monotonic() - until + options.seconds:.0f} s; {len(failed)} failed", *failed[:5], sep="\n  "
    )
    entries: list[dict[str, Any]] = []
    with torch.no_grad():
        for model in options.models:
            entries += best_of(model, options.tokens, options.sample, until)
            torch.cuda.empty_cache()
            if options.out:
                options.out.write_text(written(entries))
    return 0


if __name__ == "__main__":
    sys.exit(main())
