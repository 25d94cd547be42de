"""What a whole eager call keeps the host of a GPU, the launch included, by kernelhub's launcher and by Triton's.

    python benchmarks/host.py [OP ...] [--ways WAY,...] [--out FILE] [--rounds N] [--json]
    python benchmarks/host.py --stub [OP ...] [--profile FORM | --against CHECKOUT] [--json]

Each op is called with its contract's example in small sizes, so that the GPU is done long before the host. In
microseconds:

    call    a call by `backend="triton"` with destinations
    fresh   the same without, so that it allocates its results
    plan    a plan's `run`, or its step's, with destinations
    launch  the adapter's launch alone, with the operands of `call`: what is left of `call` are choice and checks
    layers  `call` with the tensors of four layers in turn
    gpu     what the GPU takes for `layers` where it is the limit, the host being far ahead: kernels, and what is
            between them

Ways of launching (WAYS) take turns at each op, each in a process of its own, since what launches a kernel is settled
when it is compiled. After each op `--out` is written, with what is known by then. A figure is the least of its
processes, in each of which it is the least of short samples: what a busy host adds is not the library's. For
comparison, `fill` is what torch takes to fill one element, which is a launch and little else, and `empty` what it takes
to allocate a result.

`--stub` needs no GPU: a stub takes the place of the driver (see `host_stub`). Its figures are empty Python calls, and
only compare two versions on one machine. `--against` measures another checkout as well, in the order before, after,
after, before, and prints after over before, with the lowest and highest ratio of the pairs of runs. `--profile call`
prints where the Python of that form spends its time.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import itertools
import json
import os
import platform
import pstats
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from calls import SMALL, _arguments, _destinations, _on_gpu, _taken

from kernelhub.errors import NoKernel
from kernelhub.ops import functions
from kernelhub.runtime import launch

SAMPLE = 20
BUDGET_S = 0.15  # for each figure of each process
TIME_LIMIT_S = 300  # of each process
FORMS = ("call", "fresh", "plan", "launch", "layers", "gpu")
WAYS = {
    "own": {},  # kernelhub's launcher, as it comes
    "triton": {"KERNELHUB_DIRECT_LAUNCH": "0"},
    "kernels": {"KERNELHUB_LAUNCH_GRAPHS": "0"},  # kernelhub's launcher, kernel by kernel
    "several": {"HOST_GRAPH_LEAST": "2"},  # calls of several kernels as graphs, others by a plain launch
}
NUM_LAYERS, AHEAD = 4, 100  # sets of tensors, and calls that the GPU makes one after the other
# The goals of an eager call, in microseconds, the launch included.
GOALS = {
    **dict.fromkeys(("attention", "paged_attention", "mla_attention", "fp8_gemm", "fp4_gemm", "grouped_gemm"), 10.0),
    "fused_moe": 20.0,
}
GOAL = 6.0
# Sizes of decode steps where the small ones of `calls` would take another path than a decode step's.
SIZES: dict[str, dict[str, Any]] = {
    **SMALL,
    "paged_attention": {"seq_lens": (1024,) * 8},
    "mla_attention": {"seq_lens": (1024,) * 8},
    "fp8_gemm": {"tokens": 16, "n": 2048, "k": 2048},
    "fp4_gemm": {"tokens": 16, "n": 2048, "k": 2048},
}


def measure(name: str, seconds: float) -> dict[str, float]:
    """Microseconds of an op with a Triton kernel, in this process; nothing if it has none."""
    ((_, function),) = named((name,))
    with _on_gpu(function.op):
        try:
            calls = forms_of(function)
        except NoKernel as error:  # of Triton
            print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
            return {}
        found = {form: round(host_us(call, seconds), 2) for form, call in calls.items()}
        return {**found, "gpu": round(gpu_us(calls["layers"]), 2)}


def named(names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """The ops of these names, or all, with their functions."""
    SMALL.update(SIZES)
    for function in functions():
        name = function.op.contract.name
        if not names or name in names:
            yield name, function


def forms_of(function: Any) -> dict[str, Callable[[], Any]]:
    """The forms of an op's call that are timed."""
    contract = function.op.contract
    arguments = {**_arguments(contract.name, contract.example), "backend": "triton"}
    results = function(**arguments)
    given = {**arguments, **_destinations(function, results, arguments)}
    plan = function.prepare(**arguments)
    run, of_run = plan.run, {name: value for name, value in given.items() if name not in plan.weights}
    if hasattr(plan, "begin"):
        run = plan.begin(**_taken(plan.begin, given)).run
    taken = _taken(run, of_run)
    return {
        "call": lambda: function(**given),
        "fresh": lambda: function(**arguments),
        "plan": lambda: run(**taken),
        **launch_of(function, given),
        "layers": layers_of(function, given),
    }


def layers_of(function: Any, given: dict[str, Any]) -> Callable[[], Any]:
    """The call with the tensors of several layers in turn."""
    in_turn = itertools.cycle([_cloned(given) for _ in range(NUM_LAYERS)])
    return lambda: function(**next(in_turn))


def _cloned(given: Any) -> Any:
    """The same values in other memory, with the same strides."""
    if isinstance(given, dict):
        return {name: _cloned(value) for name, value in given.items()}
    if isinstance(given, list | tuple) and given and isinstance(given[0], torch.Tensor):
        return type(given)(map(_cloned, given))
    if not isinstance(given, torch.Tensor):
        return given
    return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device).copy_(given)


def gpu_us(call: Callable[[], Any]) -> float:
    """The microseconds of a call on the GPU in a row of them that the host has launched before the first one starts."""
    least_ms = float("inf")
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # some 10 ms
        begin.record()
        for _ in range(AHEAD):
            call()
        end.record()
        end.synchronize()
        least_ms = min(least_ms, begin.elapsed_time(end))
    return 1e3 * least_ms / AHEAD


def launch_of(function: Any, given: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """The adapter's launch, with the operands of a call; nothing for an op whose adapters have another."""
    adapter = function.prepare(**{name: value for name, value in given.items() if not name.startswith("out_")}).adapter
    if not hasattr(adapter, "launch"):
        return {}
    found: list[Any] = []
    kind, launch = type(adapter), type(adapter).launch

    def noted(self: Any, *operands: Any, **named: Any) -> Any:
        found[:] = [self, operands, named]
        return launch(self, *operands, **named)

    kind.launch = noted
    try:
        function.op._forget()  # whole calls, too, which reach no adapter
        function(**given)
    finally:
        kind.launch = launch
        function.op._forget()
    if not found:
        return {}
    own, operands, by_name = found
    return {"launch": lambda: launch(own, *operands, **by_name)}


def host_us(call: Callable[[], Any], budget_s: float = BUDGET_S) -> float:
    """The least microseconds of a call in short samples, which the GPU's queue never fills."""
    synchronize: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(5):
        call()
    least_s, spent_s = float("inf"), 0.0
    while spent_s < budget_s:
        synchronize()
        start = time.perf_counter()
        for _ in range(SAMPLE):
            call()
        elapsed_s = time.perf_counter() - start
        least_s, spent_s = min(least_s, elapsed_s / SAMPLE), spent_s + elapsed_s
    synchronize()
    return 1e6 * least_s


def on_stub(names: tuple[str, ...], profiled: str | None) -> dict[str, Any]:
    """The same on a stub of the driver, in empty calls of Python."""
    from host_stub import install_stub

    install_stub()
    if profiled:
        for name, function in named(names):
            with _on_gpu(function.op):
                print(f"{name}, {profiled}:\n{profile(forms_of(function)[profiled])}")
        return {}
    found: dict[str, Any] = {}
    for name, function in named(names):
        with _on_gpu(function.op):
            try:
                calls = forms_of(function)
            except NoKernel as error:
                print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            found[name] = {form: round(in_empty_calls(call), 1) for form, call in calls.items()}
    return found


def against(before: Path, names: tuple[str, ...]) -> dict[str, dict[str, tuple[float, float, float]]]:
    """For each op and form after over before: of the means of two runs each, then least and most of pairs of runs."""
    after, runs = Path(__file__).parent.parent, []
    for folder in (before.resolve(), after, after, before.resolve()):
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        command = [sys.executable, str(folder / "benchmarks" / "host.py"), "--stub", "--json", *names]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        runs.append(json.loads(done.stdout))
    found: dict[str, dict[str, tuple[float, float, float]]] = {}
    for op, forms in runs[1].items():
        for form in forms:
            if any(form not in run.get(op, {}) for run in runs):
                continue
            first, second, third, fourth = (run[op][form] for run in runs)
            pairs = [new / old for new in (second, third) for old in (first, fourth)]
            ratio = (second + third) / (first + fourth)
            found.setdefault(op, {})[form] = (round(ratio, 2), round(min(pairs), 2), round(max(pairs), 2))
    return found


def comparison_table(found: dict[str, dict[str, tuple[float, float, float]]]) -> str:
    """For people."""
    lines = [f"{'after / before':24} " + " ".join(f"{form:>17}" for form in FORMS)]
    for op, forms in found.items():
        shown = ["{:.2f} ({:.2f}-{:.2f})".format(*forms[form]) if form in forms else "" for form in FORMS]
        lines.append(f"{op:24} " + " ".join(f"{figure:>17}" for figure in shown))
    return "\n".join(lines)


def in_empty_calls(call: Callable[[], Any]) -> float:
    """What a call takes, in empty calls of Python: the median over pairs of samples that are taken one after the other.

    A machine that others use changes its speed from second to second, so samples of two runs cannot be compared.
    """
    for _ in range(5):
        call()
    ratios, until = [], time.perf_counter() + 4 * BUDGET_S
    while time.perf_counter() < until:
        begin = time.perf_counter()
        for _ in range(SAMPLE):
            call()
        middle = time.perf_counter()
        for _ in range(10 * SAMPLE):
            _nothing()
        end = time.perf_counter()
        ratios.append(10 * (middle - begin) / (end - middle))
    return statistics.median(ratios)


def _nothing() -> None:
    return None


def profile(call: Callable[[], Any]) -> str:
    """Functions by their own time. The profiler adds to each call, so compare numbers of calls first."""
    for _ in range(20):
        call()
    with cProfile.Profile() as watched:
        for _ in range(2000):
            call()
    lines = io.StringIO()
    pstats.Stats(watched, stream=lines).sort_stats("tottime").print_stats(18)
    return "\n".join(line for line in lines.getvalue().splitlines() if line.strip())


def floor() -> dict[str, float]:
    """What no launcher can spare: a launch by the driver, and an allocation by torch."""
    one = torch.empty(1, dtype=torch.float32, device="cuda")
    # torch's own fill is a launch and little else: an upper bound for the driver's part.
    return {"fill": round(host_us(one.zero_), 2), "empty": round(host_us(lambda: torch.empty_like(one)), 2)}


class Process:
    """A process that measures by one way: one line of JSON about the machine, then one for each op that it is given."""

    def __init__(self, way: str, seconds: float) -> None:
        self.way = way
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--here", "--seconds", str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **WAYS[way]},
        )
        self._limit = threading.Timer(TIME_LIMIT_S, self._process.kill)
        self._limit.start()

    def answer(self, op: str = "") -> dict[str, Any]:
        """What it has measured of an op, or first what it says about the machine."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            if op:
                process.stdin.write(op + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.way}, {op or 'start'}: the process ended with {process.wait()}")
        return dict(json.loads(line))

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self._process.communicate()
        self._limit.cancel()


def compare(names: tuple[str, ...], rounds: int, ways: tuple[str, ...], seconds: float) -> Iterator[dict[str, Any]]:
    """All ways, whose processes take turns at each op; what is known after each op, since time may run out."""
    ops: dict[str, dict[str, dict[str, float]]] = {}
    for at in range(rounds):
        with contextlib.ExitStack() as running:
            processes = [running.enter_context(Process(way, seconds)) for way in ways]
            facts = [process.answer() for process in processes][-1]
            for op in [name for name, _ in named(names)]:
                for process in processes:
                    figures = process.answer(op)
                    if figures:
                        kept = ops.setdefault(op, {}).setdefault(process.way, figures)
                        ops[op][process.way] = {name: min(kept[name], us) for name, us in figures.items()}
                yield {"facts": {**facts, "rounds": at + 1}, "ops": ops}


def here(seconds: float) -> None:
    """Lines of JSON: the machine, then each op that is asked for by a line of the input."""
    import triton

    facts = {
        "device": torch.cuda.get_device_name(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"Triton {triton.__version__}",
        "launcher": launch.extension().origin or launch.extension().reason,
        "date": date.today().isoformat(),
        **floor(),
    }
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(line.strip(), seconds)), flush=True)
    print(f"graphs: {launch.graph_counts()}", file=sys.stderr)


def table(result: dict[str, Any]) -> str:
    """For people."""
    facts = result["facts"]
    lines = [f"{facts['device']}, {facts['machine']}; torch's fill of one element {facts['fill']} us, "]
    lines[0] += f"an allocation {facts['empty']} us; launcher: {facts['launcher']}"
    lines.append(f"{'us':24} {'':8}" + " ".join(f"{form:>7}" for form in FORMS) + "   goal")
    for op, ways in result["ops"].items():
        for way, figures in ways.items():
            shown = " ".join(f"{figures[form]:7.1f}" if form in figures else f"{'':7}" for form in FORMS)
            lines.append(f"{op:24} {way:8}{shown}   {GOALS.get(op, GOAL):g}")
    return "\n".join(lines)


def ratio_table(ratios: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{'empty calls':24} " + " ".join(f"{form:>8}" for form in FORMS)] if ratios else []
    for op, of in ratios.items():
        lines.append(f"{op:24} " + " ".join(f"{of[form]:>8.1f}" if form in of else f"{'':>8}" for form in FORMS))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", help="only these")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each launcher")
    parser.add_argument("--out", type=Path, help="write the JSON to this file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--ways", default="own,triton", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="for each figure of each process")
    parser.add_argument("--stub", action="store_true", help="on a stub of the driver, in empty calls of Python")
    parser.add_argument("--profile", choices=FORMS, help="with --stub: where this form spends its time")
    parser.add_argument("--against", type=Path, help="with --stub: a checkout of another version, to compare with")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names, ways = tuple(options.ops), tuple(options.ways.split(","))
    for given, known in ((names, [name for name, _ in named(())]), (ways, list(WAYS))):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"{', '.join(unknown)}: none of {', '.join(known)}")
    launch.GRAPH_LEAST = int(os.environ.get("HOST_GRAPH_LEAST", launch.GRAPH_LEAST))
    if options.stub and options.against:
        found = against(options.against, names)
        print(json.dumps(found, indent=1) if options.json else comparison_table(found))
        return 0
    if options.stub:
        ratios = on_stub(names, options.profile)
        print(json.dumps(ratios, indent=1) if options.json else ratio_table(ratios))
        return 0
    if not torch.cuda.is_available():
        print("needs a CUDA device: what a launch takes is measured where it is made", file=sys.stderr)
        return 2
    if options.here:
        here(options.seconds)
        return 0
    result: dict[str, Any] = {}
    for result in compare(names, options.rounds, ways, options.seconds):
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
