"""What several threads of one process get out of small calls, beside plain torch in the same run.

    python benchmarks/threads.py [--threads 1 2 4 8] [--json]

    op      a warm call of `kernelhub.attention`
    run     `plan.run` of the same
    torch   `scaled_dot_product_attention` on the same tensors
    add     `torch.add` of two small tensors: the least that a call of torch does
    python  a loop that calls nothing: what the interpreter's lock leaves

Each row gives calls per second of one thread, and those of several threads together as a ratio to it. A warm call takes
no lock of kernelhub; a row that falls well below `torch` and `add` says that one has come in.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable

import torch

import kernelhub

SECONDS, ATTEMPTS = 0.5, 3


def rate(call: Callable[[], object], threads: int) -> float:
    """Calls per second of so many threads together; the best of some attempts, since others use the machine too."""
    return max(_rate(call, threads) for _ in range(ATTEMPTS))


def _rate(call: Callable[[], object], threads: int) -> float:
    ended, counts = threading.Event(), [0] * threads

    def work(place: int) -> None:
        count, is_set = 0, ended.is_set
        while not is_set():
            call()
            count += 1
        counts[place] = count

    crew = [threading.Thread(target=work, args=(place,)) for place in range(threads)]
    begun = time.perf_counter()
    for thread in crew:
        thread.start()
    time.sleep(SECONDS)
    ended.set()
    for thread in crew:
        thread.join()
    return sum(counts) / (time.perf_counter() - begun)


def calls() -> dict[str, Callable[[], object]]:
    """What is called, by name."""
    torch.set_num_threads(1)
    q = torch.randn(1, 4, 8, 64)
    across = q.transpose(1, 2)
    plan = kernelhub.attention.prepare(q, q, q)

    def python() -> int:
        count = 0
        for _ in range(50):
            count += 1
        return count

    return {
        "op": lambda: kernelhub.attention(q, q, q),
        "run": lambda: plan.run(q, q, q),
        "torch": lambda: torch.nn.functional.scaled_dot_product_attention(across, across, across),
        "add": lambda: torch.add(q, q),
        "python": python,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for name, call in calls().items():
        call()
        alone = rate(call, 1)
        found[name] = {"per_second": alone} | {str(n): rate(call, n) / alone for n in asked.threads}
    if asked.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'':<8}{'1 thread':>14}" + "".join(f"{f'x{n}':>8}" for n in asked.threads))
    for name, row in found.items():
        print(f"{name:<8}{row['per_second']:>12,.0f}/s" + "".join(f"{row[str(n)]:>8.2f}" for n in asked.threads))


if __name__ == "__main__":
    main()
