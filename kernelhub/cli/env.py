"""``kernelhub env``: every variable that controls selection, its value, its source and its effect."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from kernelhub.cli.console import Console, Table
from kernelhub.cli.variables import State, Variables, read_variables
from kernelhub.dispatch.policy import Layer

_FLAGS = ("deterministic", "batch_invariant", "strict")


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The command's options."""
    parser.add_argument("--all", action="store_true", help="also print what to write and what each variable does")
    parser.add_argument("--json", action="store_true", help="print the list as JSON, and nothing else")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print every variable; 2 if one is invalid, since every call would then fail."""
    variables = read_variables()
    if arguments.json:
        console.json(_to_dict(variables))
    else:
        _show(variables, console, everything=arguments.all)
    return 2 if variables.wrong else 0


def file_words(layer: Layer) -> Iterator[str]:
    """The settings of a config file, one phrase each."""
    for key, overrides in (("prefer", layer.prefers), ("disable", layer.disables)):
        for override in overrides:
            yield f"{key} {', '.join(override.names)}" + ("" if override.ops == "*" else f" for {override.ops}")
    for flag in _FLAGS:
        value = getattr(layer, flag)
        if value is not None:
            yield f"{flag} {'on' if value else 'off'}"
    if layer.trust is not None:
        yield f"trust {layer.trust}"


def _show(variables: Variables, console: Console, *, everything: bool) -> None:
    columns = ("variable", "value", "source", "what to write", "meaning")
    number = len(columns) if everything else 3
    console.table(Table(columns[:number], [_row(state)[:number] for state in variables.states]))
    if not everything:
        console.line("--all adds what to write and what each variable does")
    file = variables.config_file()
    if file is None:
        console.line("config file: none; KERNELHUB_CONFIG names one")
    else:
        path, layer = file
        console.line(f"config file: {path}: {'; '.join(file_words(layer)) or 'no settings'}")
    if variables.engines:
        rows = [
            (item.name, item.text, item.owner, variables.became_of(item), item.successor) for item in variables.engines
        ]
        console.table(Table(("variable", "value", "of", "effect", "now written as"), rows))
    for state in variables.wrong:
        console.line(f"wrong: {state.problem}")


def _row(state: State) -> tuple[str, ...]:
    return (state.name, _shown(state), state.source, state.grammar, state.meaning)


def _shown(state: State) -> str:
    if state.text is not None:
        return state.text
    value = state.value
    if value is None or value == ():
        return "unset"
    return ",".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)


def _to_dict(variables: Variables) -> dict[str, Any]:
    file = variables.config_file()
    return {
        "variables": [dataclasses.asdict(state) for state in variables.states],
        "engines": [item.to_dict() | {"follows": variables.became_of(item)} for item in variables.engines],
        "config_file": None if file is None else {"path": file[0], "says": list(file_words(file[1]))},
    }
