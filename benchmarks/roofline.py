"""What every benchmark of kernels does: time all kernels that can run a case, torch's ways, and the machine's roofs.

A benchmark gives its cases to `main`. For each case all kernels that accept it are timed in turn with torch's own
ways of computing the same, so that what else the machine does slows all alike.

On a GPU the time that a call keeps the host is told too; a CUDA graph takes it away. Cases that say how many of their
bytes are written are timed in CUDA graphs, too, beside the fastest copy of as many bytes: see graphs.py.

The roofs are measured in the same run: bytes read per second by a sum over memory much larger than the caches,
and operations per second of a large matrix product, in bfloat16 and, where the GPU has it, in float8. A case's time at
the roof is the larger of its bytes over the first and its operations over the second.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import NoKernel
from kernelhub.evidence.timing import TimedCall, Timing, time_calls, time_once
from kernelhub.probes.device import facts

FLOAT8 = "float8_operations_per_s"
_MUCH_SLOWER = 10.0


@dataclass(frozen=True)
class Case:
    """One call to time.

    Attributes:
        label: shown and stored.
        op: name of the op.
        arguments: of the call.
        peers: torch's ways of computing the same, by name; none where torch lacks a feature.
        bytes: KV, query and output bytes that must move.
        operations: multiplications and additions that must be done.
        disagreement: how far a kernel's result lies from the chosen one's, or from the reference, in units of what is
            allowed: above 1 it is wrong. None compares largest differences to 5 % of the largest element, which tells
            a wrong kernel only.
        float8: the operations are products of float8, where the device has them.
        copies: the same arguments in memory of their own; calls go round through them, past a CPU's caches.
        written: how many of `bytes` are written, of a case to time in CUDA graphs, too.
    """

    label: str
    op: str
    arguments: dict[str, Any]
    peers: dict[str, Callable[[], Tensor]]
    bytes: int
    operations: int
    disagreement: Callable[[Any, Any], float] | None = None
    float8: bool = False
    copies: Sequence[dict[str, Any]] = ()
    written: int = 0


Cases = Sequence[Callable[[], Case]]


def drawn_on(device: torch.device) -> dict[str, Any]:
    """Arguments of an input generator: the device, and a generator of its own, which draws large tensors faster."""
    return {"device": device, "generator": torch.Generator(device).manual_seed(0)}


def roofs(device: torch.device, budget_s: float) -> dict[str, float]:
    """Bytes and bfloat16 operations per second that this machine reaches."""
    memory = torch.ones((256 << 20) // 4 if device.type == "cpu" else (4 << 30) // 4, device=device)
    rows = 1024 if device.type == "cpu" else 8192
    a = torch.randn(rows, 4096, device=device).to(torch.bfloat16)
    b = torch.randn(4096, rows, device=device).to(torch.bfloat16)
    read, product = time_calls((lambda: memory.sum(), lambda: a @ b), device, budget_s)
    found = {
        "bytes_per_s": memory.numel() * 4 / read.median_s,
        "operations_per_s": 2 * rows * 4096 * rows / product.median_s,
    }
    if device.type == "cuda" and facts(device).vendor == "nvidia" and facts(device).capability >= (8, 9):
        one = torch.ones((), device=device)
        a8, b8 = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
        (product,) = time_calls(
            (lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True),),
            device,
            budget_s,
        )
        found[FLOAT8] = 2 * rows * 4096 * rows / product.median_s
    return found


def measure(case: Case, device: torch.device, budget_s: float, roof: dict[str, float]) -> dict[str, Any]:
    """Milliseconds of every kernel that accepts the case, of torch's ways, and at the roof."""
    function = getattr(kernelhub, case.op)
    selection = function.explain(**case.arguments)
    able = [decision.kernel for decision in selection.decisions if decision.accepted]
    chosen = function(**case.arguments)
    unable: dict[str, str] = {}
    for name in able:
        try:
            got = function(**case.arguments, backend=name)
        except NoKernel as error:  # it does not load, which is found out by trying
            unable[name] = next(item.reason for item in error.selection.decisions if item.kernel == name)
            continue
        far = (case.disagreement or _disagreement)(got, chosen)
        assert far <= 1, f"{case.label}: {name} is off by {far:.3g} of what is allowed"
    plans = {name: _call(function, case, name) for name in able if name not in unable}
    calls = {**plans, **case.peers}
    ms = {name: 1e3 * timing.median_s for name, timing in _timed(calls, device, budget_s).items()}
    peak = roof["operations_per_s"]
    if case.float8:
        peak = roof.get(FLOAT8, peak)
    roof_ms = 1e3 * max(case.bytes / roof["bytes_per_s"], case.operations / peak)
    return {
        "case": case.label,
        "op": case.op,
        "chosen": selection.selected,
        "kernels_ms": {name: ms[name] for name in plans},
        "torch_ms": {name: ms[name] for name in case.peers},
        "roof_ms": roof_ms,
        **(_in_graphs(case, function, list(plans), device) if case.written and device.type == "cuda" else {}),
        **({"unable": unable} if unable else {}),
        "host_us": {
            name: _host_us(plan)
            for name, plan in plans.items()
            if device.type == "cuda" and ms[name] < _MUCH_SLOWER * min(ms.values())
        },
    }


def _in_graphs(case: Case, function: Any, names: list[str], device: torch.device) -> dict[str, Any]:
    """Microseconds of kernels in CUDA graphs, but those of torch, which may wait; and of the fastest copy."""
    from graphs import copied, copies_for, graph_us, practical_roof

    copy = practical_roof(case.bytes - case.written, case.written, device)
    sets = [case.arguments, *(copied(case.arguments) for _ in range(copies_for(case.bytes) - 1))]
    least = 24 if len(sets) > 2 else 4
    timed = {
        name: graph_us([lambda one=one, name=name: function(**one, backend=name) for one in sets], least)
        for name in names
        if not name.startswith("torch.")
    }
    return {"graph_us": timed, "copy_us": copy.us, "copy": copy.by}


def _timed(calls: dict[str, TimedCall], device: torch.device, budget_s: float) -> dict[str, Timing]:
    """Calls timed in turn, but those that take many times as long as the fastest, once."""
    once = {name: time_once(call, device) for name, call in calls.items()}
    fastest = min(timing.median_s for timing in once.values())
    close = {name: call for name, call in calls.items() if once[name].median_s < _MUCH_SLOWER * fastest}
    return once | dict(zip(close, time_calls(list(close.values()), device, budget_s), strict=True))


def _disagreement(got: Any, want: Any) -> float:
    got, want = (value[0] if isinstance(value, tuple) else value for value in (got, want))
    if not want.is_floating_point():
        return 0.0 if torch.equal(got, want) else float("inf")
    # Neighbours in e4m3 are up to 1/14 of the larger one apart, where two orders of adding up round to either.
    allowed = 0.08 if want.dtype.itemsize == 1 else 0.05
    got, want = got.float().nan_to_num(), want.float().nan_to_num()
    return float((got - want).abs().max() / (allowed * want.abs().max().clamp(min=1e-30)))


def _host_us(call: Callable[[], Tensor]) -> float:
    """Microseconds that a call keeps the host, the GPU working behind it; of one that waits for it, all of them."""
    least_s, spent_s = float("inf"), 0.0
    while spent_s < 0.02:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            call()
        elapsed_s = time.perf_counter() - start
        least_s, spent_s = min(least_s, elapsed_s / 10), spent_s + elapsed_s
    torch.cuda.synchronize()
    return 1e6 * least_s


def _call(function: Any, case: Case, name: str) -> Callable[[], Tensor]:
    """A call of one kernel, which allocates its result as torch's ways do."""
    if not case.copies:
        return lambda: function(**case.arguments, backend=name)
    round_trip = itertools.cycle([case.arguments, *case.copies])
    return lambda: function(**next(round_trip), backend=name)


def show(rows: list[dict[str, Any]]) -> None:
    """A line per kernel: its time, its share of the roof, and its speed against torch's ways."""
    for row in rows:
        best = min(row["torch_ms"].values(), default=None)
        print(f"\n{row['case']}  (roof {row['roof_ms']:.3g} ms)")
        for name, ms in row["kernels_ms"].items():
            against = f"{best / ms:6.2f} x torch's best" if best else "   torch has no such op"
            gqa = row["torch_ms"].get("sdpa, enable_gqa")
            against += f", {gqa / ms:5.2f} x enable_gqa" if gqa else ""
            mark = "*" if name == row["chosen"] else " "
            host = f", host {row['host_us'][name]:.0f} µs" if name in row.get("host_us", {}) else ""
            print(f" {mark} {name:24} {ms:10.3f} ms {100 * row['roof_ms'] / ms:5.1f} % of roof  {against}{host}")
        for name, us in row.get("graph_us", {}).items():
            print(
                f"   {name:24} {us:10.2f} µs in a graph: {100 * row['copy_us'] / us:.0f} % of a copy of as many bytes, "
                f"{1e5 * row['roof_ms'] / us:.0f} % of the roof"
            )
        for name, reason in row.get("unable", {}).items():
            print(f"   {name:24} did not run: {reason}")
        for name, ms in row["torch_ms"].items():
            print(f"   torch: {name:26} {ms:8.3f} ms {100 * row['roof_ms'] / ms:5.1f} % of roof")


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Every kernel's and every peer's share of the roof; peers are grey."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kernels = list(dict.fromkeys(name for row in rows for name in row["kernels_ms"]))
    peers = list(dict.fromkeys(name for row in rows for name in row["torch_ms"]))
    greys = [str(0.4 + 0.5 * index / max(1, len(peers) - 1)) for index in range(len(peers))]
    colours = dict(zip(kernels, plt.get_cmap("tab10").colors, strict=False)) | dict(zip(peers, greys, strict=True))
    figure, axis = plt.subplots(figsize=(10, 0.16 * sum(1 + len(_times(row)) for row in rows) + 1.2))
    place, labels, drawn = 0.0, [], set()
    for row in rows:
        times = _times(row)
        labels.append((place + (len(times) - 1) / 2, row["case"]))
        for name, ms in times.items():
            label = None if name in drawn else f"torch: {name}" if name in peers else name
            axis.barh(place, 100 * row["roof_ms"] / ms, 0.9, color=colours[name], label=label)
            drawn.add(name)
            place += 1
        place += 1
    axis.set_yticks([at for at, _ in labels], [label for _, label in labels], fontsize=8)
    axis.set_ylim(place - 0.5, -1)
    axis.set_xlabel("% of the roof measured in the same run (longer is faster)")
    axis.set_title(title)
    axis.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _times(row: dict[str, Any]) -> dict[str, float]:
    return {**row["kernels_ms"], **row["torch_ms"]}


class NoCase(Exception):
    """No case of a benchmark has such a label."""


def run(
    cases: Callable[[torch.device, bool], Cases], quick: bool, keep: Callable[[dict[str, Any]], None], only: str = ""
) -> dict[str, Any]:
    """Measure every case on the first GPU, or else on the CPU; `keep` is given the result after each of them.

    With `only`, cases whose label matches that regular expression. Operands of the others are made, but nothing runs.

    Raises:
        NoCase: no label matches.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    budget_s = 0.3 if device.type == "cuda" else 0.5 if quick else 4.0
    with torch.no_grad():
        roof = roofs(device, budget_s)
        result: dict[str, Any] = {
            "device": str(facts(device)),
            "threads": torch.get_num_threads() if device.type == "cpu" else None,
            "torch": torch.__version__,
            "date": date.today().isoformat(),
            "roofs": roof,
            "rows": [],
        }
        labels = []
        for make in cases(device, quick):
            case = make()
            labels.append(case.label)
            if re.search(only, case.label):
                result["rows"].append(measure(case, device, budget_s, roof))
                keep(result)
    if labels and not result["rows"]:
        raise NoCase(f"no case matches {only!r}; the cases are {'; '.join(labels)}")
    return result


def _file(text: str) -> Path:
    """The path of a file to write, checked before anything is measured."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: name a file in a folder that exists")
    return path


def _picture(text: str) -> Path:
    """The same of a picture."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib draws it: pip install matplotlib")
    return _file(text)


def _earlier(text: str) -> dict[str, Any]:
    """The result of an earlier run."""
    try:
        result: dict[str, Any] = json.loads(Path(text).read_text())
        _ = result["rows"], result["roofs"]
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON of such a run, as --out writes it") from None
    return result


def _expression(text: str) -> str:
    """The text, if it is a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text


def main(description: str, cases: Callable[[torch.device, bool], Cases]) -> int:
    """Run a benchmark by its command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer cases, shorter measurements")
    parser.add_argument(
        "--only", type=_expression, default="", help="a regular expression of the cases' labels; all of them by default"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=_file, help="also write the JSON to this file, after each case anew")
    parser.add_argument("--show", dest="shown", type=_earlier, help="show this JSON of an earlier run; measure nothing")
    parser.add_argument("--plot", type=_picture, help="also draw the result into this file")
    options = parser.parse_args()

    def keep(result: dict[str, Any]) -> None:
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")

    try:
        result = options.shown or run(cases, options.quick, keep, options.only)
    except NoCase as error:
        parser.error(f"--only: {error}")
    keep(result)
    if options.plot:
        plot(result["rows"], f"{result['device']}, torch {result['torch']}, {result['date']}", options.plot)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        roof = result["roofs"]
        print(
            f"{result['device']}: reads {roof['bytes_per_s'] / 1e9:,.0f} GB/s, "
            f"{roof['operations_per_s'] / 1e9:,.0f} GFLOP/s in bfloat16"
            + (f", {roof[FLOAT8] / 1e9:,.0f} in float8" if FLOAT8 in roof else "")
        )
        show(result["rows"])
    return 0
