"""``kernelhub explain``: the verdict on a problem written as flags, for this machine or one that is not here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import kernelhub
from kernelhub.cli.asked_machine import add_machine, machine_of
from kernelhub.cli.console import Console, Table
from kernelhub.cli.facets import add_facets, given, op_named, ops
from kernelhub.cli.models import family_of
from kernelhub.dispatch.problem import WEIGHT_LAYOUT, as_dict
from kernelhub.dispatch.selection import Decision, Selection


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The command's own options, and the facets of the op that `words` name."""
    parser.add_argument("op", metavar="OP", type=op_named, help=f"what is asked: {', '.join(ops())}")
    add_machine(parser)
    parser.add_argument(
        "--backend",
        metavar="NAME[,NAME]",
        type=_names,
        help="as backend= of the call: the first of these that can",
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON, and nothing else")
    asked = next((word for word in words if word in ops()), None)
    if asked is None:
        parser.epilog = f"{parser.epilog}; `kernelhub explain OP --help` lists the facets of an op"
        return
    contract = ops()[asked].op.contract
    family = family_of(contract)
    if family is not None:
        names = ", ".join(family.models)
        parser.add_argument("--model", metavar="NAME", help=f"fill the facets from a model: {names}")
    add_facets(parser, contract)
    if WEIGHT_LAYOUT in contract.schema.facets:
        help_text = "weights are packed before the kernel runs, so those that need it are ranked with the others"
        parser.add_argument("--packing", action="store_true", help=help_text)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print the verdict; 1 if no kernel can run."""
    verdict = _verdict(arguments)
    if arguments.json:
        console.json(verdict.to_dict())
    else:
        show_verdict(verdict, console)
    return 0 if verdict.kernel else 1


def show_verdict(verdict: Selection[Any], console: Console) -> None:
    """The verdict in full: the question, the answer, who decided, and every kernel with its reasons."""
    console.heading(f"{verdict.op} on {verdict.problem.device}: {verdict.selected or 'no kernel can run this'}")
    console.line(f"decided by: {verdict.source}, {verdict.because}")
    for sentence in verdict.overruled:
        console.line(f"overruled: {sentence}")
    if verdict.faster:
        console.line(f"faster: {verdict.faster[0].hint}")
    console.line(f"problem: {_written(verdict)}")
    if verdict.assumed:
        console.line(f"assumed: {verdict.assumed}")
    if verdict.weights:
        console.line(verdict.weights)
    console.table(decision_table(verdict))


def decision_table(verdict: Selection[Any]) -> Table:
    """Every kernel with what was decided on it; a row for each reason against one."""
    rows = [row for decision in verdict.decisions for row in _rows(decision)]
    return Table(("kernel", "verdict", "code", "reason", "remedy"), rows)


def _rows(decision: Decision) -> list[tuple[str, ...]]:
    word = "runs" if decision.code == "selected" else "able" if decision.accepted else "no"
    reasons = decision.rejections or (decision,)
    return [(decision.kernel, word, reason.code, reason.reason, reason.remedy) for reason in reasons]


def _verdict(arguments: argparse.Namespace) -> Selection[Any]:
    function = arguments.op
    facets = given(arguments, function.op.contract)
    family = family_of(function.op.contract)
    if family is not None and arguments.model is not None:
        facets = family.with_model(arguments.model, function.op.contract, facets)
    machine = machine_of(arguments)
    packing = getattr(arguments, "packing", False)
    said = {"device": arguments.device, "backend": arguments.backend, "machine": machine, "packing": packing}
    return kernelhub.explain(function, **said, **facets)


def _written(verdict: Selection[Any]) -> str:
    """The facets of the problem; of the features, those that are asked for."""
    schema = ops()[verdict.op].op.contract.schema
    facets = as_dict(verdict.problem)
    return ", ".join(
        name if facets[name] is True else f"{name}={facets[name]}"
        for name, facet in schema.facets.items()
        if name != "device" and not (facet.semantic and facets[name] == facet.neutral)
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; give backends or kernels, e.g. triton,torch.sdpa")
    return names
