"""`python -m tests.fuzz`: see the package's docstring."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

import torch

from tests.fuzz.case import CaseId, run_case
from tests.fuzz.kernels import kernels_here, ops
from tests.fuzz.kinds import NAMES
from tests.fuzz.run import Result, counted, run, table

_AT_ONCE = 2000  # of each kernel, by one child


def main(words: list[str] | None = None) -> int:
    asked = _parsed(words)
    device = asked.device
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    kinds = [kind for kind in NAMES if asked.kinds is None or any(fnmatch(kind, word) for word in asked.kinds)]
    if asked.case is not None:
        return _alone(asked, kinds)
    begun = time.monotonic()
    results: list[Result] = []
    chosen = [op for op in ops() if asked.op is None or any(fnmatch(op, word) for word in asked.op)]
    share = asked.seconds * asked.jobs / max(len(chosen), 1)

    def one(op: str) -> None:
        kernels = kernels_here(op, device, asked.backend, asked.kernel)
        ends = min(time.monotonic() + share, begun + asked.seconds) if asked.seconds else None
        for first in range(0, asked.cases, _AT_ONCE):
            numbers = range(first, min(first + _AT_ONCE, asked.cases))
            cases = [CaseId(op, kernel, kinds[n % len(kinds)], n, asked.seed) for n in numbers for kernel in kernels]
            results.extend(run(cases, device, ends, _tell))
        if asked.json:  # after each op, for who looks on and for a run that is ended
            _keep(asked.json, list(results))

    with ThreadPoolExecutor(asked.jobs) as pool:
        list(pool.map(one, chosen))
    print(table(results))
    failed = _failed(results)
    print(f"{len(results)} cases in {time.monotonic() - begun:.0f} s, {len(failed)} failed")
    if not results:
        print("no case ran: no kernel has the name, or --seconds ended while children imported torch and compiled")
    return bool(failed) or not results


def _parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.fuzz", description="a differential fuzzer for every kernel")
    parser.add_argument("--op", type=_words, help="ops, or globs, separated by commas; all by default")
    parser.add_argument("--backend", type=_words, help="backends, kernels or globs; all by default")
    parser.add_argument("--kernel", type=_words, help="the same; `default` is whatever is chosen")
    parser.add_argument("--kinds", type=_words, help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=100, help="for each kernel of each op, over all kinds")
    parser.add_argument("--case", type=int, help="run this case alone, in this process, and show it")
    parser.add_argument("--seconds", type=float, default=0.0, help="end after this time, shared by the ops; 0: no end")
    parser.add_argument("--jobs", type=int, default=1, help="ops that run beside each other")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", type=Path, help="where counts and failures are kept")
    return parser.parse_args(words)


def _words(text: str) -> list[str]:
    return text.split(",")


def _alone(asked: argparse.Namespace, kinds: list[str]) -> int:
    """One case, shown."""
    torch.set_num_threads(1)
    case = CaseId(asked.op[0], asked.kernel[0], kinds[0], asked.case, asked.seed)
    found = run_case(case, torch.device(asked.device), show=True)
    print(f"{found.outcome.kind}: {found.outcome.text} ({found.seconds:.2f} s)")
    if found.outcome.error is not None:
        traceback.print_exception(found.outcome.error)
    return found.outcome.kind == "failed"


def _tell(result: Result) -> None:
    if result.kind in ("failed", "broken"):
        print(f"{result.kind.upper()} {result.text} [{result.note}]\n    {result.case.command}", flush=True)


def _failed(results: list[Result]) -> list[Result]:
    return [result for result in results if result.kind in ("failed", "broken")]


def _keep(path: Path, results: list[Result]) -> None:
    counts = [{"op": op, "kernel": kernel, "kind": kind, **row} for (op, kernel, kind), row in counted(results).items()]
    failed = [{"text": result.text, "note": result.note, "command": result.case.command} for result in _failed(results)]
    path.write_text(json.dumps({"counts": counts, "failed": failed}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
