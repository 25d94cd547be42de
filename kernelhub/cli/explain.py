"""``kernelhub explain``: the kernel selected for a problem written as flags, for this machine or a simulated one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import kernelhub
from kernelhub.cli.console import Console, Table
from kernelhub.cli.facets import add_facets, given, op_named, ops
from kernelhub.cli.options import add_machine, add_model_name, facets_of_model, machine_of, names
from kernelhub.dispatch.problem import WEIGHT_LAYOUT, as_dict
from kernelhub.dispatch.selection import REJECTED, SELECTED, Decision, Selection
from kernelhub.errors import ConfigurationError

_SAID_FIRST = {"quarantined": "quarantined", "known_bad": "known bad"}  # codes whose reasons are figures or symptoms


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The command's own options, and the facets of the op that `words` name."""
    parser.add_argument("op", metavar="OP", type=op_named, help=f"the op: {', '.join(ops())}")
    add_machine(parser)
    parser.add_argument(
        "--backend",
        metavar="NAME[,NAME]",
        type=names,
        help="as backend= of the call: the first of these that supports the problem",
    )
    parser.add_argument("--json", action="store_true", help="print the selection as JSON, and nothing else")
    parser.add_argument("--all", action="store_true", help="list every kernel with all its reasons and remedies")
    asked = next((word for word in words if word in ops()), None)
    if asked is None:
        parser.epilog = f"{parser.epilog}; `kernelhub explain OP --help` lists the facets of an op"
        return
    contract = ops()[asked]
    add_model_name(parser)
    add_facets(parser, contract)
    if WEIGHT_LAYOUT in contract.schema.facets:
        help_text = "assume that weights will be packed, so that kernels for packed weights are ranked too"
        parser.add_argument("--packing", action="store_true", help=help_text)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print the selection; 1 if no kernel can run."""
    selection, model = _selection(arguments)
    if arguments.json:
        console.json(selection.to_dict())
    else:
        show_selection(selection, console, every_reason=arguments.all, asked=arguments.backend or (), model=model)
    return 0 if selection.kernel else 1


def show_selection(
    selection: Selection[Any], console: Console, *, every_reason: bool, asked: Sequence[str], model: str
) -> None:
    """The problem, the selected kernel, what decided, and every other kernel with its first reason, or with all."""
    console.heading(f"{selection.op} on {selection.problem.device}: {selection.selected or 'no kernel can run this'}")
    said = [("decided by", f"{selection.source}, {selection.because}")]
    if selection.steps:
        said.append(("steps", "; ".join(selection.steps)))
        said += [(step, kernel) for step, kernel, _ in selection.called]
    said += [(part.op, f"{part.selected}: {part.because.partition(': ')[0]}") for part in selection.parts]
    said += [("overruled", sentence) for sentence in selection.overruled]
    if selection.faster:
        said.append(("faster", selection.faster[0].hint))
    said.append(("problem", _written(selection)))
    if model:
        said.append(("model", model))
    if selection.assumed:
        said.append(("assumed", selection.assumed))
    if selection.weights:
        said.append(("weights", selection.weights.removeprefix("weights: ")))
    console.entries(said)
    console.line()
    if every_reason:
        console.table(reasons_table(selection.decisions))
        for step, kernel, part in selection.called:
            console.line()
            console.heading(f"{step}: {kernel}")
            console.table(reasons_table(part.decisions))
        return
    console.table(Table(("kernel", "selection", "reason"), summary_rows(selection.decisions, asked)))
    if any(not decision.accepted for decision in selection.decisions):
        console.line("--all lists every kernel with all its reasons and remedies")


def summary_rows(decisions: Sequence[Decision], asked: Sequence[str] = ()) -> list[tuple[str, str, str]]:
    """A row for each kernel with its first reason; kernels of one library rejected for the same reason share a row.

    A kernel that was requested by name has its own row, with every reason.
    """
    rows: dict[tuple[str, str, str], list[str]] = {}
    for decision in decisions:
        library = decision.kernel.partition(".")[0]
        named = decision.kernel in asked and not decision.accepted
        alone = decision.kernel if decision.accepted or decision.ahead or named else ""
        reason = "; ".join(item.reason for item in decision.rejections) if named else ""
        rows.setdefault((library, alone, reason or _first_reason(decision)), []).append(decision.kernel)
    by_name = {decision.kernel: decision for decision in decisions}
    made = []
    for (_, _, reason), kernels in rows.items():
        decision = by_name[kernels[0]]
        more = len(decision.rejections) - 1 if len(kernels) == 1 and kernels[0] not in asked else 0
        made.append((named_together(kernels), decision.state, f"{reason} (and {more} more)" if more > 0 else reason))
    return [row for row in made if row[1] != REJECTED] + [row for row in made if row[1] == REJECTED]


def reasons_table(decisions: Sequence[Decision]) -> Table:
    """Every kernel; a row for each reason against one."""
    rows = [row for decision in decisions for row in _rows(decision)]
    return Table(("kernel", "selection", "code", "reason", "remedy"), rows)


def _first_reason(decision: Decision) -> str:
    if decision.state == SELECTED:
        return decision.reason.partition(": ")[0]  # its evidence is printed above the table
    if decision.code in _SAID_FIRST:
        return f"{_SAID_FIRST[decision.code]}: {decision.reason}"
    return decision.reason.removeprefix("supported, ") if decision.accepted else decision.reason


def named_together(kernels: Sequence[str]) -> str:
    """One name for kernels of one library."""
    return kernels[0] if len(kernels) == 1 else f"{kernels[0].partition('.')[0]}: {len(kernels)} kernels"


def _rows(decision: Decision) -> list[tuple[str, ...]]:
    reasons = decision.rejections or (decision,)
    return [(decision.kernel, decision.state, reason.code, reason.reason, reason.remedy) for reason in reasons]


def _selection(arguments: argparse.Namespace) -> tuple[Selection[Any], str]:
    """The selection, and a sentence about the model of its problem."""
    record = arguments.op
    facets = given(arguments, record)
    model = ""
    if arguments.model is not None:
        facets, model = facets_of_model(arguments.model, record, facets, arguments.phase)
    elif arguments.phase is not None:
        raise ConfigurationError("--phase belongs to --model; name a model, e.g. --model llama-3.1-8b")
    machine = machine_of(arguments)
    packing = getattr(arguments, "packing", False)
    said = {"device": arguments.device, "backend": arguments.backend, "machine": machine, "packing": packing}
    return kernelhub.explain(record.name, **said, **facets), model


def _written(selection: Selection[Any]) -> str:
    """The facets of the problem; of the features, those that it requires."""
    schema = ops()[selection.op].schema
    facets = as_dict(selection.problem)
    return ", ".join(
        name if facets[name] is True else f"{name}={facets[name]}"
        for name, facet in schema.facets.items()
        if name != "device" and not (facet.semantic and facets[name] == facet.neutral)
    )
