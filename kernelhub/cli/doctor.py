"""``kernelhub doctor``: what is here, what each finding means, and what to do about it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from kernelhub.cli import machine_facts
from kernelhub.cli.console import Console, Table
from kernelhub.cli.fact import NOTE, OK, PROBLEM, Fact
from kernelhub.cli.probe_plugins import probed
from kernelhub.errors import KernelhubError


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The command's options."""
    parser.add_argument(
        "--probe-plugins", action="store_true", help="import each plugin in a child first, and none that ends it"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, and nothing else")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print every finding; 1 if one is a problem, which keeps calls from running."""
    facts = [*(probed() if arguments.probe_plugins else ()), *_facts()]
    problems = sum(fact.status == PROBLEM for fact in facts)
    if arguments.json:
        console.json({"ok": not problems, "facts": [fact.to_dict() for fact in facts]})
    else:
        columns = ("status", "what", "what it means", "what to do")
        console.table(Table(columns, [(fact.status, fact.what, fact.meaning, fact.remedy) for fact in facts]))
        console.line(_summary(facts, problems))
    return 1 if problems else 0


def _facts() -> Iterator[Fact]:
    yield machine_facts.python()
    torch = machine_facts.torch_package()
    yield torch
    devices = machine_facts.devices() if torch.status == OK else []
    yield from devices
    if torch.status == OK:
        yield from machine_facts.toolchain()
    yield from machine_facts.caches()
    yield from machine_facts.extras()
    yield from machine_facts.broken_distributions()
    if torch.status == OK:
        yield from _dispatch_facts(all(device.status != PROBLEM for device in devices))


def _dispatch_facts(devices_answer: bool) -> Iterator[Fact]:
    """What the library itself says; it can only be imported where torch can."""
    from kernelhub.cli import dispatch_facts
    from kernelhub.cli.variables import read_variables

    try:
        variables = read_variables()
        yield from dispatch_facts.settings(variables)
        can_choose = devices_answer and not variables.wrong
        yield from dispatch_facts.engines(variables)
        yield from dispatch_facts.libraries(variables, can_choose)
        if can_choose:
            yield from dispatch_facts.known_defects(variables)
            yield from dispatch_facts.quarantine()
            yield from dispatch_facts.trust()
            yield from dispatch_facts.tuned()
        yield from dispatch_facts.plugins(variables)
        if can_choose:
            yield from dispatch_facts.verdicts()
    except KernelhubError as error:
        yield Fact(PROBLEM, "kernelhub cannot be set up", str(error), "see the message")


def _summary(facts: Sequence[Fact], problems: int) -> str:
    notes = sum(fact.status == NOTE for fact in facts)
    if problems:
        return f"{problems} to mend before calls run, {notes} to know of"
    return f"nothing keeps calls from running; {notes} to know of"
