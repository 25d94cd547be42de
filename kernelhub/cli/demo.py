"""``kernelhub demo``: run attention and a block of experts; print each kernel, why it ran, its error and its speed."""

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
    """Run every case and print the results; 1 if an error exceeds its tolerance."""
    from kernelhub.cli.demonstration import demonstrate  # imports torch, which help does not need

    return demonstrate(arguments, console)
