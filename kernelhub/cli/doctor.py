"""``kernelhub doctor``: the state of this machine, what each finding means, and what to do about it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kernelhub.cli import link_facts, machine_facts
from kernelhub.cli.console import Console, Table
from kernelhub.cli.fact import (
    ABSENT,
    CACHES,
    EVIDENCE,
    KERNELS,
    LIBRARIES,
    MACHINE,
    NOTE,
    OK,
    PARTS,
    PROBLEM,
    SETTINGS,
    TOOLCHAIN,
    Fact,
)
from kernelhub.cli.probe_plugins import probed
from kernelhub.errors import KernelhubError


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The command's options."""
    parser.add_argument(
        "--probe-plugins", action="store_true", help="import each plugin in a child first, skip those that end it"
    )
    parser.add_argument("--all", action="store_true", help="print every finding with what it means")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, and nothing else")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print the findings; 1 if one of them is a problem, which makes calls fail."""
    facts = [*(_of(LIBRARIES, probed()) if arguments.probe_plugins else ()), *_facts()]
    problems = sum(fact.status == PROBLEM for fact in facts)
    if arguments.json:
        console.json({"ok": not problems, "facts": [fact.to_dict() for fact in facts]})
        return 1 if problems else 0
    if arguments.all:
        columns = ("status", "what", "what it means", "what to do")
        console.table(Table(columns, [(fact.status, fact.what, fact.meaning, fact.remedy) for fact in facts]))
    else:
        _show(facts, console)
    console.line(_summary(facts, problems))
    return 1 if problems else 0


def _show(facts: Sequence[Fact], console: Console) -> None:
    """One line per part of the machine; then each problem and note with its remedy."""
    rows = []
    for part in PARTS:
        fine = [fact for fact in facts if fact.part == part and fact.status == OK]
        if part == KERNELS and fine:
            rows.append((part, f"{len(fine)} ops run the first kernel of their order; `kernelhub backends` lists them"))
        elif fine:
            rows.append((part, "; ".join(dict.fromkeys(_short(fact) for fact in fine))))
    absent: dict[str, str] = {}
    for fact in facts:
        if fact.status == ABSENT:
            name = fact.what.partition(" ")[0]
            absent[name] = absent.get(name) or fact.remedy
    if absent:
        rows.append(("not installed", ", ".join(absent)))
    console.entries(rows)
    useful = [(f"  {name}", remedy) for name, remedy in absent.items() if remedy]
    if useful:
        console.line()
        console.heading("not installed, and useful here")
        console.entries(useful)
    for status in (PROBLEM, NOTE):
        found = [fact for fact in facts if fact.status == status]
        if found:
            console.line()
            console.heading(f"{status}s")
        for fact in found:
            console.line(f"{fact.what}: {fact.meaning}" if fact.meaning else fact.what, indent=2)
            if fact.remedy:
                console.line(f"fix: {fact.remedy}", indent=4)
    console.line()


def _short(fact: Fact) -> str:
    """A finding without library paths and meaning, which ``--all`` prints."""
    if fact.part == LIBRARIES:
        return fact.what.partition(" (")[0]
    return f"{fact.what}, {fact.meaning}" if fact.what.startswith("torch ") else fact.what


def _facts() -> Iterator[Fact]:
    yield from _of(MACHINE, [machine_facts.python()])
    torch = machine_facts.torch_package()
    yield from _of(MACHINE, [torch])
    devices = machine_facts.devices() if torch.status == OK else []
    yield from _of(MACHINE, devices)
    if torch.status == OK:
        yield from _of(MACHINE, link_facts.links())
    if torch.status == OK:
        yield from _of(TOOLCHAIN, machine_facts.toolchain())
    yield from _of(CACHES, machine_facts.caches())
    yield from _of(LIBRARIES, machine_facts.extras())
    yield from _of(LIBRARIES, machine_facts.broken_distributions())
    if torch.status == OK:
        yield from _dispatch_facts(all(device.status != PROBLEM for device in devices))


def _of(part: str, facts: Iterable[Fact]) -> Iterator[Fact]:
    """The facts, assigned to a part of the machine."""
    return (replace(fact, part=part) for fact in facts)


def _dispatch_facts(devices_answer: bool) -> Iterator[Fact]:
    """Facts from the library itself, which can only be imported if torch can."""
    from kernelhub.cli import dispatch_facts
    from kernelhub.cli.variables import read_variables

    try:
        variables = read_variables()
        yield from _of(SETTINGS, dispatch_facts.settings(variables))
        can_choose = devices_answer and not variables.wrong
        if not variables.wrong:
            yield from _of(TOOLCHAIN, [machine_facts.launcher()])
        yield from _of(SETTINGS, dispatch_facts.engines(variables))
        yield from _of(LIBRARIES, dispatch_facts.libraries(variables, can_choose))
        if can_choose:
            yield from _of(LIBRARIES, dispatch_facts.known_defects(variables))
            yield from _of(EVIDENCE, dispatch_facts.quarantine())
            yield from _of(EVIDENCE, dispatch_facts.trust())
            yield from _of(EVIDENCE, dispatch_facts.tuned())
        yield from _of(LIBRARIES, dispatch_facts.plugins(variables))
        if can_choose:
            yield from _of(KERNELS, dispatch_facts.selections())
    except KernelhubError as error:
        yield Fact(PROBLEM, "kernelhub cannot be set up", str(error), "see the message", SETTINGS)


def _summary(facts: Sequence[Fact], problems: int) -> str:
    notes = _count(sum(fact.status == NOTE for fact in facts), "note")
    if problems:
        return f"{_count(problems, 'problem')} to fix before calls run, {notes}"
    return f"no problems, {notes}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
