"""``kernelhub warmup``: compile and verify what serving a model needs, and keep it on disk for later processes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import kernelhub
from kernelhub.cli.console import Console, Table
from kernelhub.cli.options import add_machine, add_model, add_packing, counts, machine_of, seconds, served
from kernelhub.errors import ConfigurationError
from kernelhub.ops.models.problems import PHASES
from kernelhub.runtime.caches.store import PATIENCE_S
from kernelhub.runtime.progress import bar
from kernelhub.warming.defaults import CONTEXT_LEN, MAX_CONTEXT_LEN, TOKEN_COUNTS, TOKEN_COUNTS_OF_CPU, VERIFY_BUDGET_S
from kernelhub.warming.outcome import WarmUp

if TYPE_CHECKING:
    from kernelhub.warming.there import Listed


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The command's options."""
    add_model(parser, required=True)
    parser.add_argument("--phase", choices=PHASES, action="append", help="only this phase; may be repeated")
    parser.add_argument(
        "--tokens",
        metavar="N[,N]",
        type=counts,
        help=f"new tokens per engine step, up to the most (default: {','.join(map(str, TOKEN_COUNTS))}; "
        f"on a CPU {','.join(map(str, TOKEN_COUNTS_OF_CPU))})",
    )
    parser.add_argument("--context-len", metavar="TOKENS", type=int, default=CONTEXT_LEN, help="cached, per sequence")
    parser.add_argument(
        "--max-context-len", metavar="TOKENS", type=int, default=MAX_CONTEXT_LEN, help="the longest sequence served"
    )
    parser.add_argument("--jobs", metavar="N", type=int, help="processes that compile (default: as memory allows)")
    parser.add_argument("--no-verify", action="store_true", help="do not check kernels against references")
    parser.add_argument(
        "--verify-budget-s",
        metavar="SECONDS",
        type=seconds,
        default=VERIFY_BUDGET_S,
        help=f"most time for kernels that would be first and are not verified here (default: {VERIFY_BUDGET_S:g})",
    )
    parser.add_argument("--build", action="store_true", help="build kernels that take minutes to compile, too")
    add_packing(parser)
    parser.add_argument(
        "--timeout-s",
        metavar="SECONDS",
        type=float,
        default=PATIENCE_S,
        help=f"how long to wait for another process that compiles on this node (default: {PATIENCE_S:g})",
    )
    parser.add_argument("--list", action="store_true", help="list what would be prepared, for any device; run nothing")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, and nothing else")
    add_machine(parser)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Warm up and print what is ready; 1 if something is not."""
    setting: dict[str, Any] = {
        "token_counts": arguments.tokens,
        "device": arguments.device,
        "phases": tuple(arguments.phase or PHASES),
        "packing": arguments.packing,
        **served(arguments),
    }
    machine = machine_of(arguments)
    if arguments.list:
        from kernelhub.warming.there import list_wanted

        listed = list_wanted(arguments.model, machine=machine, **setting)
        _show_list(listed, arguments.json, console)
        return 0
    if machine is not None:
        raise ConfigurationError("--with describes another machine; add --list to print what it would need")
    from kernelhub.evidence.apart import all_apart

    with all_apart(), bar(sys.stderr) as progress:
        try:
            done = kernelhub.warmup(
                arguments.model,
                **setting,
                context_len=arguments.context_len,
                max_context_len=arguments.max_context_len,
                jobs=arguments.jobs,
                verify=not arguments.no_verify,
                verify_budget_s=arguments.verify_budget_s,
                build=arguments.build,
                progress=progress,
                timeout_s=arguments.timeout_s,
            )
        except KeyboardInterrupt:
            print("kernelhub: interrupted; finished work is kept, run the same command again", file=sys.stderr)
            raise
    if arguments.json:
        console.json(done.to_dict())
    else:
        _show(done, console)
    return 0 if done.ok else 1


def _show(done: WarmUp, console: Console) -> None:
    columns = ("how", "op", "kernel", "for", "tokens", "seconds")
    rows = [
        (item.how, item.op, item.kernel, item.label, _span(item.tokens), f"{item.seconds:.2f}") for item in done.items
    ]
    console.table(Table(columns, rows))
    for item in done.failures:
        console.line(f"{item.op}, {item.label}: {item.reason}")
    for op, kernel, reason in done.quarantined:
        console.line(f"{op} {kernel} is quarantined, the next best kernel is used: {reason}")
    for earning in done.earned:
        console.line(str(earning))
    for op, kernel, reason in done.unverified:
        console.line(f"{op} {kernel} is not verified: {reason}")
    for note in done.notes:
        console.line(note)
    console.line(done.summary())


def _show_list(listed: list[Listed], as_json: bool, console: Console) -> None:
    if as_json:
        console.json({"items": [item.to_dict() for item in listed]})
        return
    rows = [(item.op, item.kernel or "none can run it", item.label, _span(item.tokens)) for item in listed]
    console.table(Table(("op", "kernel", "for", "tokens"), rows))
    calls = sum(len(item.tokens) for item in listed)
    kernels = len({(item.op, item.kernel) for item in listed})
    console.line(f"{len(listed)} items, {kernels} kernels, {calls} calls")


def _span(tokens: tuple[int, ...]) -> str:
    """Token counts, few of them one by one."""
    if len(tokens) <= 4:
        return ", ".join(map(str, tokens))
    return f"{tokens[0]} to {tokens[-1]} ({len(tokens)})"
