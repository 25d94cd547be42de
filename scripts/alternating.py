"""Times of calls in CUDA graphs whose samples alternate, for the scripts that choose kernels' forms on one GPU."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton

_SAMPLES, _SAMPLE_MS = 5, 6.0
Call = Callable[[int], Any]  # by its number in a graph


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


def measured(calls: Mapping[str, Call], count: int) -> dict[str, Any]:
    """Times in ms, and how far results are from the last's; what cannot run is left out."""
    made: dict[str, torch.Tensor] = {}
    failed: dict[str, str] = {}
    for name, call in calls.items():
        error = attempt(lambda call=call, name=name: made.__setitem__(name, call(0).float()))  # type: ignore[misc]
        if error is not None:
            failed[name] = error
    torch.cuda.synchronize()
    off = off_from_last(made)
    made.clear()
    times = medians({name: call for name, call in calls.items() if name in off}, count)
    return {"kernels_ms": times, "off": off, **({"failed": failed} if failed else {})}
