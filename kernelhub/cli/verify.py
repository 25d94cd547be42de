"""``kernelhub verify``: check every kernel that supports a problem against the reference on this machine."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import IO, Any

import kernelhub
from kernelhub.cli.console import Console, Table, steps
from kernelhub.cli.facets import add_facets, given, op_named, ops
from kernelhub.cli.options import counts, names, seconds
from kernelhub.dispatch.hub import HUB
from kernelhub.evidence.budgets import FULL_BUDGET_S, QUICK_BUDGET_S
from kernelhub.evidence.results import NOT_RUN, RIGHT, Result, Verification


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The command's options."""
    parser.add_argument("op", metavar="OP", nargs="?", type=op_named, help=f"one op (default: all): {', '.join(ops())}")
    parser.add_argument(
        "--backend", metavar="NAME[,NAME]", type=names, help="backends, kernels or globs (default: all)"
    )
    parser.add_argument("--device", metavar="NAME", help="cuda, cuda:1 or cpu (default: the first GPU, else the CPU)")
    parser.add_argument("--quick", action="store_true", help="a few cases of each kernel, and those that failed before")
    parser.add_argument("--case", metavar="LABEL", help="one case of OP alone, by the label that a failure prints")
    parser.add_argument(
        "--budget-s",
        metavar="SECONDS",
        type=seconds,
        help=f"most time for each kernel (default: {FULL_BUDGET_S:g}, with --quick {QUICK_BUDGET_S:g})",
    )
    parser.add_argument(
        "--plugins",
        choices=("yes", "no"),
        default="yes",
        help="no: third-party backends are neither imported nor run (default: yes)",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON, and nothing else")
    parser.add_argument(
        "--token-counts",
        metavar="N[,N]",
        type=counts,
        help="verify one problem class, with so many new tokens, up to the most that a step will have",
    )
    asked = next((word for word in words if word in ops()), None)
    if asked is None:
        parser.epilog = f"{parser.epilog}; `kernelhub verify OP --help` lists the facets of an op"
    else:
        add_facets(parser, ops()[asked])


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Verify and print the results; 1 if a kernel is wrong, or none could run."""
    from kernelhub.evidence.apart import all_apart
    from kernelhub.evidence.verify import count

    if arguments.plugins == "no":
        os.environ["KERNELHUB_PLUGINS"] = "none"  # children that run kernels read it too
        kernelhub.reload()
    _say_what_runs(sys.stderr)
    asked = {"backend": arguments.backend, "device": arguments.device}
    name = None if arguments.op is None else arguments.op.name
    of_class: dict[str, Any] = {}
    if arguments.op is not None and (facets := given(arguments, arguments.op)):
        of_class["facets"] = facets
    if arguments.case is not None:
        of_class["case"] = arguments.case
    if arguments.token_counts:
        of_class["token_counts"] = arguments.token_counts
    with all_apart(), steps("verifying", count(name, **asked), sys.stderr) as step:
        found = kernelhub.verify(
            name,
            **asked,
            quick=arguments.quick,
            budget_s=arguments.budget_s,
            progress=lambda kernel, place, number: step(kernel),
            **of_class,
        )
    if arguments.json:
        console.json(found.to_dict())
    else:
        _show(found, console)
    return 0 if found.ok and found.counts[RIGHT] else 1


def _say_what_runs(stream: IO[str]) -> None:
    """Report that verification runs the code that each record names, also that of third parties."""
    _ = HUB.settings
    foreign = [item for item in HUB.registry.backends.values() if not item.builtin and not item.error]
    message = "verify imports and runs the code that the kernels' records name"
    if foreign:
        names = ", ".join(f"{item.name} ({item.distribution or item.origin})" for item in foreign)
        message += f", also of third parties: {names}; --plugins=no leaves these out"
    print(message, file=stream)


def _show(found: Verification, console: Console) -> None:
    if not found.results:
        console.line("none of these kernels can be selected on this device; `kernelhub backends` says why")
        return
    console.table(
        Table(("result", "op", "kernel", "checks", "worst", "what"), [_row(result) for result in found.results])
    )
    for op, kernel in found.lifted:
        console.line(f"{op} {kernel} passed and is no longer quarantined")
    for result in found.results:
        if result.failures:
            console.line(f"{result.op} {result.kernel} is quarantined:")
            for check in result.failures:
                console.line(f"{check.code}: {check.case}: {check.figures} ({check.problem})", indent=2)
            words = ("kernelhub", "verify", result.op, "--backend", result.kernel, "--case", result.failures[0].case)
            console.line(f"run the first of these again: {shlex.join(words)}", indent=2)
    console.line(found.summary())
    if found.unwritten:
        console.line(f"valid in this process only: {found.unwritten}")


def _row(result: Result) -> tuple[str, ...]:
    if result.status == NOT_RUN:
        return (result.status, result.op, result.kernel, "", "", result.reason)
    left = f"{result.left_out} cases left out" if result.left_out else ""
    what = "; ".join(filter(None, (result.reason, left)))
    return (result.status, result.op, result.kernel, str(len(result.checks)), f"{result.worst:.2g}", what)
