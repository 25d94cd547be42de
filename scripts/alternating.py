"""Times of calls in CUDA graphs whose samples alternate, for the scripts that choose kernels' forms on one GPU."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton

from kernelhub.backends.shared.launches import WATCHED

_SAMPLES, _SAMPLE_MS = 5, 6.0
Call = Callable[[int], Any]  # by its number in a graph
Calls = dict[str, Callable[[], Any]]


class Checked(Calls):
    """Calls whose results are compared with a reference before they are timed, and whose times with a vendor's.

    Args:
        calls: the calls by name.
        right: whether a result, in float32, is that of the reference.
        vendor: the name of the vendor's call.
        sample_ms: of a sample; of long calls more, so that clocks settle.
    """

    def __init__(self, calls: Calls, right: Callable[[torch.Tensor], bool], vendor: str, sample_ms: float) -> None:
        super().__init__(calls)
        self.right, self.vendor, self.sample_ms = right, vendor, sample_ms


def options_of(doc: str) -> argparse.ArgumentParser:
    """The options that such scripts share."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9)
    return parser


def facts(doc: str) -> dict[str, Any]:
    """The device, versions and date; the method is the third paragraph of a script's text."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": date.today().isoformat(),
        "method": doc.split("\n\n")[2].replace("\n", " "),
    }


def attempt(call: Callable[[], Any]) -> str | None:
    """What was wrong with a call; None if it ran."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def run_cases(doc: str, cases: Mapping[str, Callable[[], Calls]], count: int) -> int:
    """The main function of a script of such cases, whose graphs have `count` calls, all the same."""
    options = options_of(doc).parse_args()
    if options.compile:
        return compile_calls(options, cases)

    return time_cases(doc, options, cases, functools.partial(run_case, count=count))


def run_case(make: Callable[[], Calls], count: int) -> dict[str, Any]:
    """What is found of such a case."""
    calls = make()
    again = {name: functools.partial(_again, call) for name, call in calls.items()}
    if isinstance(calls, Checked):
        return {"vendor": calls.vendor, **measured(again, count, calls.sample_ms, calls.right)}
    return measured(again, count)


def time_cases(
    doc: str,
    options: argparse.Namespace,
    cases: Mapping[str, Any],
    row_of: Callable[[Any], dict[str, Any]],
) -> int:
    """Write what is found of each case of this part, after each."""
    began = time.monotonic()
    part, parts = map(int, options.part.split("/"))
    rows: list[dict[str, Any]] = []
    about = facts(doc)
    for at, (name, case) in enumerate(cases.items()):
        if options.only not in name or at % parts != part or time.monotonic() - began > options.seconds:
            continue
        row: dict[str, Any] = {"case": name}
        try:
            torch.manual_seed(0)
            row |= row_of(case)
        except Exception:
            row["error"] = traceback.format_exc()[-600:]
        torch.cuda.empty_cache()
        row["at_s"] = round(time.monotonic() - began, 1)
        rows.append(row)
        print(beside(row, row["vendor"]) if "vendor" in row else json.dumps(row), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print(f"part {options.part}: {time.monotonic() - began:.1f} s", flush=True)
    return 0


def compile_calls(options: argparse.Namespace, cases: Mapping[str, Callable[[], Calls]]) -> int:
    """Make this part of the calls of all cases once."""
    began = time.monotonic()
    part, parts = map(int, options.part.split("/"))
    number = 0
    for name, make in cases.items():
        if options.only not in name or time.monotonic() - began > options.seconds:
            continue
        try:
            calls = make()
        except Exception as error:
            print(name, f"{type(error).__name__}: {error}"[:200], flush=True)
            continue
        for of, call in calls.items():
            number += 1
            if number % parts == part and (error_of := attempt(call)):
                print(name, of, error_of, flush=True)
        torch.cuda.synchronize()
        calls = {}
        torch.cuda.empty_cache()
    print(f"part {options.part}: {time.monotonic() - began:.1f} s", flush=True)
    return 0


def _again(call: Callable[[], Any], _: int) -> Any:
    """Each call of a graph is the same."""
    return call()


def captured(call: Call, count: int) -> torch.cuda.CUDAGraph:
    """So many calls in a graph, replayed once. The call has run before."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for at in range(count):
            call(at)
    graph.replay()
    return graph


def sample(graph: torch.cuda.CUDAGraph, rounds: int) -> float:
    """Milliseconds of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(rounds):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / rounds


def medians(calls: Mapping[str, Call], count: int, sample_ms: float = _SAMPLE_MS) -> dict[str, float]:
    """Milliseconds of one call: graphs of `count` calls, samples of `sample_ms` each that take turns."""
    graphs = {name: captured(call, count) for name, call in calls.items()}
    rounds = {name: max(1, int(sample_ms / sample(graph, 2))) for name, graph in graphs.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(_SAMPLES):
        for name, graph in graphs.items():
            times[name].append(sample(graph, rounds[name]) / count)
    return {name: round(statistics.median(samples), 5) for name, samples in times.items()}


def off_from_last(made: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """How far results are from the last one's, as a share of its root mean square."""
    want = [*made.values()][-1].float()
    scale = want.square().mean().sqrt()
    return {name: round(float((out.float() - want).square().mean().sqrt() / scale), 5) for name, out in made.items()}


def measured(
    calls: Mapping[str, Call],
    count: int,
    sample_ms: float = _SAMPLE_MS,
    right: Callable[[torch.Tensor], bool] | None = None,
) -> dict[str, Any]:
    """Times in ms, and how far results are from the last's; what cannot run is left out.

    With `right`, also whether each result, in float32, is that of the reference; what is not is not timed.
    """
    made: dict[str, torch.Tensor] = {}
    failed: dict[str, str] = {}
    for name, call in calls.items():
        error = attempt(lambda call=call, name=name: made.__setitem__(name, call(0).float()))  # type: ignore[misc]
        if error is not None:
            failed[name] = error
    torch.cuda.synchronize()
    off = off_from_last(made)
    agree = {name: right(result) for name, result in made.items()} if right else dict.fromkeys(made, True)
    made.clear()
    times = medians({name: call for name, call in calls.items() if agree.get(name)}, count, sample_ms)
    more: dict[str, Any] = {"right": agree} if right else {}
    return {"kernels_ms": times, "off": off, **more, **({"failed": failed} if failed else {})}


def host_us(call: Callable[[], Any], batches: int = 40, calls: int = 50) -> float:
    """Microseconds that an eager call which comes again keeps the host: the least mean of many batches."""
    for _ in range(50):
        call()
    best = float("inf")
    for _ in range(batches):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - began) / calls)
    return best * 1e6


def launches_us(call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each launch of a call, repeated in a graph.

    Its counters are cleared by a launch that is timed too. Launches that the launcher repeats are not seen, so the call
    is an adapter's first or second of its kind.
    """
    WATCHED.launches = []
    call()
    watched: Any = WATCHED.launches
    WATCHED.launches = None
    alone: dict[str, Any] = {}
    for at, (launcher, grid, variant, arguments) in enumerate(watched):
        names = launcher.kernel.arg_names
        counter = arguments[names.index("counter")] if "counter" in names else None
        run = functools.partial(launcher, grid, variant, *arguments)
        alone[f"{at} {launcher.kernel.fn.__name__}"] = functools.partial(_launch, run, counter)
        if counter is not None:
            alone["the counters"] = functools.partial(_launch, None, counter)
    return {name: round(1000 * ms, 2) for name, ms in medians(alone, 4, 2.0).items()}


def _launch(run: Callable[[], None] | None, counter: torch.Tensor | None, _: int) -> None:
    if counter is not None:
        counter.zero_()
    if run is not None:
        run()


def beside(row: Mapping[str, Any], vendor: str) -> str:
    """A row as text: the vendor's ms, and what share of its speed each other call has."""
    times = row.get("kernels_ms", {})
    if vendor not in times:
        return json.dumps(row)[:700]
    shares = (f"{name} {100 * times[vendor] / ms:.1f} %" for name, ms in times.items() if name != vendor)
    wrong = [name for name, agrees in row.get("right", {}).items() if not agrees]
    more = "".join(f"; {what}: {row[what]}" for what in ("failed", "launches_us") if what in row)
    return (
        f"{row['case']}: {vendor} {times[vendor]} ms; {', '.join(shares)}{f'; WRONG: {wrong}' if wrong else ''}{more}"
    )
