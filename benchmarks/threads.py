"""What several threads of one process get out of small calls, beside plain torch in the same run.

    python benchmarks/threads.py [--threads 1 2 4 8] [--json]

    op      a warm call of `kernelhub.attention`
    run     `plan.run` of the same
    paged   a warm call of `kernelhub.paged_attention` as on a GPU, each thread with a block table of its own; its
            kernel does no more than clear `out`, so that the interpreter's lock changes hands in it as in a launch
    step    `step.run` of the same, each thread with a step of its own
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
import types
from collections.abc import Callable
from typing import Any

import torch
from dispatch import Nothing, serving_run

import kernelhub
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Backend, Band, Kernel
from kernelhub.dispatch.standing import verified
from kernelhub.ops.attention.problem import PagedAttentionProblem

SECONDS, ATTEMPTS = 0.5, 3


class Clears(Nothing):
    """A kernel that clears `out`."""

    def launch(self, q: Any, k: Any, v: Any, step: Any, values: Any, out: Any, lse: Any) -> None:
        out.zero_()


CLEARS = types.SimpleNamespace(
    BACKEND=Backend("clears", "a kernel that clears its destination"),
    KERNELS=(
        Kernel(
            op="paged_attention",
            name="clears.out",
            target=f"{__name__}:Clears",
            summary="clears out",
            band=Band.PLUGIN,
            standings=(verified("*", evidence="it clears its destination"),),
            constraints=(anything(*PagedAttentionProblem.__dataclass_fields__),),
        ),
    ),
)


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
    q, k, v = torch.randn(3, 1, 4, 8, 64)
    across = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    plan = kernelhub.attention.prepare(q, k, v)

    def python() -> int:
        count = 0
        for _ in range(50):
            count += 1
        return count

    return {
        "op": lambda: kernelhub.attention(q, k, v),
        "run": lambda: plan.run(q, k, v),
        **paged_calls(),
        "torch": lambda: torch.nn.functional.scaled_dot_product_attention(*across),
        "add": lambda: torch.add(q, q),
        "python": python,
    }


def paged_calls() -> dict[str, Callable[[], object]]:
    """Decode over pages, with metadata of each thread's own."""
    kernelhub.register_backend(CLEARS)
    q, own = torch.zeros(8, 32, 128, dtype=torch.bfloat16), threading.local()
    k_cache, v_cache = torch.zeros(2, 64, 16, 8, 128, dtype=torch.bfloat16)
    op = kernelhub.paged_attention

    def metadata() -> tuple[Any, ...]:
        return torch.zeros(8, 64, dtype=torch.int32), torch.ones(8, dtype=torch.int32)

    op(q, k_cache, v_cache, *metadata())
    plan = op.prepare(q, k_cache, v_cache, *metadata())
    assert plan.kernel == "clears.out"
    serving_run(op, plan)

    def of_thread() -> tuple[Any, ...]:
        try:
            held: tuple[Any, ...] = own.held
        except AttributeError:
            given = metadata()
            held = own.held = (*given, torch.empty_like(q), plan.begin(*given).run)
        return held

    def paged() -> object:
        block_table, seq_lens, out, _ = of_thread()
        return op(q, k_cache, v_cache, block_table, seq_lens, out=out)

    def step() -> object:
        _, _, out, run = of_thread()
        return run(q, k_cache, v_cache, out)

    return {"paged": paged, "step": step}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if min(asked.threads) < 1:
        parser.error(f"--threads {min(asked.threads)}: give numbers of threads, 1 or more")
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
