"""``kernelhub bench``: time every supported kernel of one problem on this machine."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernelhub
from kernelhub.cli.console import Console, Table, steps
from kernelhub.cli.facets import add_facets, from_words, given, op_named, ops
from kernelhub.cli.options import add_model_name, check_writable, counts, facets_of_model, names, seconds
from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.problem import as_dict
from kernelhub.errors import ConfigurationError

_BUDGET_S = 2.0


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The command's own options, and the facets of the op that `words` name."""
    parser.add_argument("op", metavar="OP", type=op_named, help=f"what is timed: {', '.join(ops())}")
    parser.add_argument(
        "--shape",
        metavar="FACET=VALUE[,...]",
        action="append",
        default=[],
        help="facets in one word, e.g. num_q_heads=32,num_kv_heads=8; may be repeated",
    )
    parser.add_argument("--tokens", metavar="N[,N]", type=counts, default=(1, 64), help="new tokens (default: 1,64)")
    parser.add_argument(
        "--context-len", metavar="N", type=int, default=1024, help="cached tokens per sequence (default: 1024)"
    )
    parser.add_argument("--backend", metavar="NAME[,NAME]", type=names, help="only these backends or kernels")
    parser.add_argument("--device", metavar="NAME", help="cuda, cuda:1 or cpu (default: the first GPU, else the CPU)")
    parser.add_argument(
        "--budget-s",
        metavar="SECONDS",
        type=seconds,
        default=_BUDGET_S,
        help=f"about how long each number of tokens is measured (default: {_BUDGET_S:g})",
    )
    parser.add_argument("--png", metavar="FILE", type=Path, help="also plot the times (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print the times as JSON, and nothing else")
    asked = next((word for word in words if word in ops()), None)
    if asked is None:
        parser.epilog = f"{parser.epilog}; `kernelhub bench OP --help` lists the facets of an op"
        return
    add_model_name(parser)
    add_facets(parser, ops()[asked])


@dataclass(frozen=True)
class Row:
    """Times of one kernel.

    Attributes:
        kernel: its name.
        us: by number of tokens, microseconds of a call.
        noise_us: by number of tokens, the standard deviation of samples.
    """

    kernel: str
    us: dict[int, float]
    noise_us: dict[int, float]


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Time and print; 1 if no kernel can run the problem."""
    if arguments.png is not None:
        _pyplot()  # before anything takes time
        check_writable("--png", arguments.png)
    if arguments.context_len < 1:
        raise ConfigurationError(f"--context-len {arguments.context_len}: give a number of tokens, 1 or more")
    problem, selection = _asked(arguments)
    chosen = [item.kernel for item in selection.decisions if item.accepted]
    if arguments.backend is not None:
        HUB.registry.check_names(arguments.backend, "--backend")
        chosen = [name for name in chosen if {name, name.partition(".")[0]} & set(arguments.backend)]
    rows = _measured(arguments, problem, chosen) if chosen else []
    if arguments.json:
        document = {"op": selection.op, "problem": as_dict(problem), "selected": selection.selected}
        console.json({**document, "kernels": [{**vars(row)} for row in rows]})
    else:
        _show(selection, rows, arguments.tokens, console)
    if arguments.png is not None and rows:
        _plot(selection, rows, arguments.png)
    return 0 if rows else 1


def _asked(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The problem on a device of this machine, and the selection for it."""
    from kernelhub.dispatch.explain import device_facts, problem_from
    from kernelhub.evidence.verify import device_here

    record: OpRecord[Any] = arguments.op
    facets = {**given(arguments, record), **from_words(arguments.shape, record)}
    if arguments.model is not None:
        facets, _ = facets_of_model(arguments.model, record, facets, arguments.phase)
    device = device_facts(device_here(arguments.device))
    selection = kernelhub.explain(record.name, device=device, **facets)
    return problem_from(record, device, facets), selection


def _measured(arguments: argparse.Namespace, problem: Any, kernels: Sequence[str]) -> list[Row]:
    """A row for each kernel that ran, in the order of selection; a kernel that failed is left out with a message."""
    from kernelhub.dispatch.hub import HUB
    from kernelhub.evidence.timing import time_calls
    from kernelhub.evidence.verify import device_here
    from kernelhub.ops.models.calls import calls_of, counts_of, need_of

    device, op = device_here(arguments.device), arguments.op.name
    function = HUB.function(op)
    rows = {name: Row(name, {}, {}) for name in kernels}
    need = need_of(op, problem)
    if not counts_of(need, arguments.tokens):
        shown = ",".join(map(str, arguments.tokens))
        facets = ", ".join(name for name in ("q_len", "length", "rows", "m") if hasattr(problem, name))
        raise ConfigurationError(
            f"--tokens {shown}: {op} has no call with this number of new tokens for the problem; give another "
            f"number, or the facet that sets it ({facets})"
        )
    calls = calls_of(need, arguments.tokens, device, context_len=arguments.context_len)
    with steps("timing", len(arguments.tokens), sys.stderr) as step:
        for call in calls:
            step(call.label)
            bound = {}
            for name in kernels:
                made = functools.partial(function, **call.arguments, backend=name)
                try:
                    made()
                except (kernelhub.errors.KernelhubError, RuntimeError) as error:
                    print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
                else:
                    bound[name] = made
            timings = time_calls(tuple(bound.values()), device, arguments.budget_s) if bound else []
            for name, timing in zip(bound, timings, strict=True):
                rows[name].us[call.tokens] = timing.median_s * 1e6
                rows[name].noise_us[call.tokens] = timing.noise_s * 1e6
    return [row for row in rows.values() if row.us]


def _show(selection: Any, rows: Sequence[Row], tokens: Sequence[int], console: Console) -> None:
    console.heading(f"{selection.op} on {selection.problem.device}, selected: {selection.selected or 'no kernel'}")
    if not rows:
        console.line(f"no kernel can be timed: `kernelhub explain {selection.op}` with the same facets says why")
        return
    measured = [count for count in tokens if any(count in row.us for row in rows)]
    best = {count: min(row.us[count] for row in rows if count in row.us) for count in measured}

    def cell(row: Row, count: int) -> str:
        if count not in row.us:
            return "not measured"
        return f"{_digits(row.us[count])} us ({row.us[count] / best[count]:.2f}x)"

    columns = ("kernel", *(f"{count} tokens" for count in measured))
    console.table(Table(columns, [(row.kernel, *(cell(row, count) for count in measured)) for row in rows]))
    console.line("in brackets: time relative to the fastest")


def _digits(us: float) -> str:
    return f"{us:,.0f}" if us >= 1000 else f"{us:.3g}"


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigurationError("--png: matplotlib is not installed; pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _plot(selection: Any, rows: Sequence[Row], path: Path) -> None:
    """Time over tokens, a line for each kernel."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for row in rows:
        axes.plot(list(row.us), list(row.us.values()), marker="o", label=row.kernel)
    axes.set(xscale="log", yscale="log", xlabel="new tokens", ylabel="us a call")
    axes.set_title(f"{selection.op} on {selection.problem.device.name}")
    axes.legend()
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight", format="png")
    except OSError as error:
        raise ConfigurationError(f"--png {path}: {error.strerror or error}; name a writable path") from None
    finally:
        pyplot.close(figure)
