"""Completion in shells by argcomplete: ``eval "$(register-python-argcomplete kernelhub)"``."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Mapping, Sequence


def complete(summaries: Mapping[str, str]) -> int:
    """Print a word's completions for a shell and end the process; 1 if argcomplete is missing."""
    try:
        import argcomplete
    except ImportError:
        return 1
    argcomplete.autocomplete(parser_for(summaries, os.environ.get("COMP_LINE", "").split()[1:]))
    return 1


def parser_for(summaries: Mapping[str, str], words: Sequence[str]) -> argparse.ArgumentParser:
    """All commands, with the options of the one that is being typed."""
    parser = argparse.ArgumentParser(prog="kernelhub")
    commands = parser.add_subparsers(dest="command")
    for name, summary in summaries.items():
        one = commands.add_parser(name, help=summary)
        one.epilog = ""
        if words[:1] != [name]:
            continue
        importlib.import_module(f"kernelhub.cli.{name}").add_arguments(one, words[1:])
        for action in one._actions:
            known = _known(action)
            if known:
                action.type, action.choices = None, known  # this parser only completes words
    return parser


def _known(action: argparse.Action) -> tuple[str, ...]:
    """The values of an op, a model or a device."""
    if action.metavar == "OP":
        from kernelhub.ops.records import OPS

        return tuple(record.name for record in OPS)
    if "--model" in action.option_strings:
        from kernelhub.ops.models.published import CONFIGS

        return tuple(CONFIGS)
    if "--device" in action.option_strings and action.choices is None:
        from kernelhub.probes.device import SIMULATED

        return (*SIMULATED, "cpu", "cuda")
    return ()
