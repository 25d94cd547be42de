"""``kernelhub demo``: attention and a block of experts through the hub: which kernel ran, why, how exact, how fast."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kernelhub.cli.console import Console


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The command's options."""
    parser.add_argument("--device", choices=("cuda", "cpu"), help="where to run (default: the first GPU, else the CPU)")
    parser.add_argument("--quick", action="store_true", help="smaller shapes and shorter measurements")
    parser.add_argument("--all", action="store_true", help="list every kernel of each case with all reasons against it")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, and nothing else")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Run every case and print what came out; 1 if a result is further from the reference than allowed."""
    from kernelhub.cli.demonstration import demonstrate  # needs torch, which help does not

    return demonstrate(arguments, console)
