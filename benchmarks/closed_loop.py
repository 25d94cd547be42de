"""What closed-loop clients alone make of TTFT and ITL: a serving engine's steps by arithmetic, no GPU.

    python benchmarks/closed_loop.py [--clients 128 --input 1024 --output 1024 --delays 5,10,20,40,60]

Each client sends its next prompt when the one before has ended, `delay` milliseconds until the scheduler has it. A step
takes the running sequences' next tokens and as much of waiting prompts as its budget of new tokens has room for, and is
scheduled when the step before begins, as vLLM does. Its time is linear in its sequences, their context and its new
tokens: `Times`, by default those of Llama 3.1 8B on an H200, fitted to benchmarks/results/serving_by_lengths_h200.json.

Prompts that start together end together, and the next ones queue while a step with prompts runs. The table shows how
much of TTFT p50 and of ITL p99 comes of that: runs differ in the delay and in the seed of its jitter, in no kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from serving import share


class Times(NamedTuple):
    """Seconds of a step: a constant, and for each sequence, token of context and new token of a prompt."""

    step: float = 4.6e-3
    sequence: float = 4e-6
    context: float = 3.4e-8
    prompt: float = 22.3e-6


class Load(NamedTuple):
    """Clients with `rounds` prompts each, and new tokens of a step."""

    clients: int = 128
    input: int = 1024
    output: int = 1024
    rounds: int = 2
    budget: int = 8192


class Found(NamedTuple):
    """Milliseconds, output tokens/s, and the part of gaps between tokens that had a prompt's step in them."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    tpot_p50: float
    tokens_per_s: float
    gaps_with_prompts: float


@dataclasses.dataclass(eq=False)
class Served:
    """A request's times and what of it is computed."""

    sent: float
    computed: int = 0
    tokens: list[float] = dataclasses.field(default_factory=list)


def simulate(load: Load, times: Times, delay: float, seed: int) -> Found:
    """Serve all prompts; `delay` in seconds varies by 30 % and a step's time by 1 %, as the seed has it."""
    draw = random.Random(seed)
    arriving: list[tuple[float, int, Served]] = []
    made: list[Served] = []
    heard = 0.0

    def send(now: float) -> None:
        """A client's next prompt; the server's process takes one after another, a millisecond each."""
        nonlocal heard
        if len(made) < load.clients * load.rounds:
            made.append(Served(now))
            heard = max(heard, now + delay * draw.uniform(0.7, 1.3)) + 1e-3
            heapq.heappush(arriving, (heard, len(made), made[-1]))

    for _ in range(load.clients):
        send(draw.uniform(0, 2e-3))
    waiting: deque[Served] = deque()
    running: list[Served] = []
    gaps: list[tuple[float, bool]] = []
    begun = now = 0.0
    while running or waiting or arriving:
        while arriving and arriving[0][0] <= begun:  # what the scheduler knew when the step before began
            waiting.append(heapq.heappop(arriving)[2])
        left, batch = load.budget, []
        for sequence in running:
            batch.append((sequence, max(1, min(load.input - sequence.computed, left))))
            left -= batch[-1][1]
        while waiting and left > 0:
            running.append(waiting.popleft())
            batch.append((running[-1], min(load.input, left)))
            left -= batch[-1][1]
        if not batch:
            begun = now = arriving[0][0]
            continue
        context = sum(sequence.computed for sequence, _ in batch if sequence.tokens)
        prompts = sum(new for sequence, new in batch if not sequence.tokens)
        took = times.step + times.sequence * len(batch) + times.context * context + times.prompt * prompts
        begun, now = now, now + took * draw.gauss(1, 0.01)
        for sequence, new in batch:
            sequence.computed += new
            if sequence.computed < load.input:
                continue
            if sequence.tokens:
                gaps.append((now - sequence.tokens[-1], prompts > 0))
            sequence.tokens.append(now)
            if len(sequence.tokens) == load.output:
                running.remove(sequence)
                send(now)
    first = [sequence.tokens[0] - sequence.sent for sequence in made]
    rest = [(sequence.tokens[-1] - sequence.tokens[0]) / max(1, load.output - 1) for sequence in made]
    wall = max(sequence.tokens[-1] for sequence in made) - min(sequence.sent for sequence in made)
    waits = [gap for gap, _ in gaps]
    shown = (share(first, 0.5), share(first, 0.99), share(waits, 0.5), share(waits, 0.99), share(rest, 0.5))
    mixed = sum(with_prompts for _, with_prompts in gaps) / len(gaps)
    return Found(*(1e3 * value for value in shown), len(made) * load.output / wall, mixed)


def table(load: Load, times: Times, delays: Sequence[float], seeds: int) -> str:
    """A row for each delay in milliseconds: the least and the most of its seeds."""
    lines = [f"{'delay, ms':>9} " + " ".join(f"{name:>17}" for name in Found._fields)]
    for delay in delays:
        runs = [simulate(load, times, delay / 1e3, seed) for seed in range(seeds)]
        spans = [f"{min(column):.4g} to {max(column):.4g}" for column in zip(*runs, strict=True)]
        lines.append(f"{delay:>9g} " + " ".join(f"{span:>17}" for span in spans))
    return "\n".join(lines)


def _delays(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, value in Load()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, seconds in Times()._asdict().items():
        parser.add_argument(f"--{name}-us", type=float, default=1e6 * seconds, help="microseconds of a step")
    parser.add_argument(
        "--delays", type=lambda text: [float(part) for part in text.split(",")], default=[5, 20, 40, 60]
    )
    parser.add_argument("--seeds", type=int, default=8)
    given = parser.parse_args(arguments)
    if min(given.clients, given.input, given.output, given.rounds, given.seeds, given.budget - given.clients) < 1:
        parser.error("give 1 or more of each, and a budget above the clients")
    load = Load(*(getattr(given, name) for name in Load._fields))
    times = Times(*(getattr(given, f"{name}_us") / 1e6 for name in Times._fields))
    print(table(load, times, given.delays, given.seeds))


if __name__ == "__main__":
    main()
