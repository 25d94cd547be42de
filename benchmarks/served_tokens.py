"""Greedy tokens of a server of vLLM over HTTP, to compare two servers of one model.

    python benchmarks/served_tokens.py --url http://localhost:8000 --tag hooks --out served.json
    python benchmarks/served_tokens.py --out served.json --show

Waits until the server is ready, then asks `/v1/completions` for continuations of random prompts of token ids, all at
once, then for one as a stream. --out collects the runs under their tags; --show compares each pair of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LENGTHS = tuple(range(420, 1620, 75))  # tokens of the prompts
CONTINUED = 100  # new tokens
TIMEOUT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="of the server, without /v1")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--tag")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds until the server is ready, at most")
    parser.add_argument("--pid", type=int, help="process of the server: if it ends, so does the wait")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    runs = json.loads(options.out.read_text()) if options.out.exists() else {}
    if not options.show:
        waited = waited_for(options.url, options.wait, options.pid)
        print(f"{options.tag}: ready after {waited:.1f} s", flush=True)
        runs[options.tag] = {"waited_s": round(waited, 1)} | asked(options.url, options.vocab)
        options.out.write_text(json.dumps(runs, indent=1))
        print({name: value for name, value in runs[options.tag].items() if name not in ("tokens", "logprobs")})
        return
    for one in runs:
        for other in runs:
            if one < other:
                print(f"{one}, {other}: {agreement(runs[one], runs[other])}")


def waited_for(url: str, timeout_s: float, pid: int | None) -> float:
    """Seconds until a server answers."""
    began = time.perf_counter()
    while True:
        try:
            _get(f"{url}/v1/models")
            return time.perf_counter() - began
        except OSError as error:
            if pid is not None and not os.path.exists(f"/proc/{pid}"):
                raise SystemExit(f"the server, process {pid}, has ended") from error
            if time.perf_counter() - began > timeout_s:
                raise SystemExit(f"no answer of {url} in {timeout_s:.0f} s: {error}") from error
            time.sleep(0.5)


def asked(url: str, vocabulary: int) -> dict[str, Any]:
    """What a server answers."""
    model = _get(f"{url}/v1/models")["data"][0]["id"]
    prompts = [_prompt(length, seed, vocabulary) for seed, length in enumerate(LENGTHS)]
    common = {"model": model, "max_tokens": CONTINUED, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(
            pool.map(lambda ids: _post(f"{url}/v1/completions", common | {"prompt": ids, "logprobs": 1}), prompts)
        )
    choices = [answer["choices"][0] for answer in answers]
    tokens = [choice["token_ids"] for choice in choices]
    events = list(_stream(f"{url}/v1/completions", common | {"prompt": prompts[0], "stream": True}))
    streamed = [token for _, choice in events for token in choice.get("token_ids") or []]
    times = [at for at, choice in events if choice.get("token_ids")]
    gaps = [1e3 * (after - before) for before, after in itertools.pairwise(times[1:])]
    return {
        "model": model,
        "tokens": tokens,
        "logprobs": [[round(value, 5) for value in choice["logprobs"]["token_logprobs"]] for choice in choices],
        "copied_share": statistics.mean(
            token in prompt for prompt, row in zip(prompts, tokens, strict=True) for token in row
        ),
        "streamed_events": len(times),
        "streamed_same_share": statistics.mean(x == y for x, y in zip(streamed, tokens[0], strict=False)),
        "streamed_tokens": len(streamed),
        "first_token_ms": round(1e3 * times[0], 2),
        "between_tokens_ms_p50": round(statistics.median(gaps), 3),
    }


def agreement(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Share of equal greedy tokens; differences of their log-probabilities up to the first token that differs."""
    equal: list[bool] = []
    apart: list[float] = []
    for row, (a, b) in enumerate(zip(one["tokens"], other["tokens"], strict=True)):
        alike = [x == y for x, y in zip(a, b, strict=True)]
        shared = alike.index(False) if False in alike else len(alike)
        equal += alike
        pairs = zip(one["logprobs"][row][:shared], other["logprobs"][row][:shared], strict=True)
        apart += [abs(x - y) for x, y in pairs]
    return {
        "tokens": len(equal),
        "same_share": round(statistics.mean(equal), 5),
        "logprob_max": round(max(apart, default=0.0), 4),
        "logprob_mean": round(statistics.mean(apart), 5) if apart else 0.0,
    }


def _prompt(length: int, seed: int, vocabulary: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, vocabulary) for _ in range(length)]


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def _post(url: str, body: dict[str, Any]) -> Any:
    with _open(url, body) as answer:
        return json.load(answer)


def _stream(url: str, body: dict[str, Any]) -> Any:
    """Seconds since the request, and the choice, of each event."""
    began = time.perf_counter()
    with _open(url, body) as answer:
        for line in answer:
            text = line.decode().strip().removeprefix("data: ")
            if text and text != "[DONE]":
                choices = json.loads(text)["choices"]
                if choices:
                    yield time.perf_counter() - began, choices[0]


def _open(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=TIMEOUT_S)


if __name__ == "__main__":
    main()
