"""``kernelhub replay``: run a call that an audit found wrong again, and check it against the reference."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kernelhub.cli.console import Console
from kernelhub.runtime.caches.cases import kept_cases


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The command's options."""
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        type=Path,
        help="the file that the audit named (default: list all that are kept)",
    )
    parser.add_argument(
        "--backend", metavar="NAME", help="a backend or kernel to run (default: the one that was wrong)"
    )
    parser.add_argument("--device", metavar="NAME", help="cuda, cuda:1 or cpu (default: the first GPU, else the CPU)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and nothing else")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Run the case and print the figures; 1 if the numbers are wrong."""
    if arguments.path is None:
        return _list(arguments.json, console)
    from kernelhub.evidence.audit.replay import replay
    from kernelhub.evidence.verify import device_here

    found = replay(arguments.path, arguments.backend, device_here(arguments.device))
    if arguments.json:
        console.json(found.to_dict())
    else:
        for line in str(found).splitlines():
            console.line(line)
    return 0 if found.ok else 1


def _list(as_json: bool, console: Console) -> int:
    """Print the stored files, newest first."""
    paths = [str(path) for path in kept_cases()]
    if as_json:
        console.json(paths)
    else:
        for line in paths or ["no calls are stored: no audit has found one wrong (KERNELHUB_AUDIT)"]:
            console.line(line)
    return 0
