"""How a model is served, as options of commands: which model, among how many ranks, in which formats."""

from __future__ import annotations

import argparse
from typing import Any

from kernelhub.cli.asked_model import MODELS
from kernelhub.ops.models.description import FORMATS

# Arguments of `kernelhub.problems_of`, with what is usual.
USUAL: dict[str, Any] = {
    "tp": 1,
    "ep": 1,
    "dtype": "bfloat16",
    "kv_dtype": None,
    "page_size": None,
    "quantization": None,
}


def add_model(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """The options ``--model``, and those that say how it is served."""
    parser.add_argument("--model", metavar="NAME", required=required, help=MODELS)
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share every layer (default: 1)")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="ranks that share the experts (default: 1)")
    parser.add_argument("--dtype", default=USUAL["dtype"], help="of activations (default: bfloat16)")
    parser.add_argument("--kv-dtype", metavar="DTYPE", help="of the KV cache (default: that of activations)")
    parser.add_argument("--page-size", type=int, metavar="N", help="tokens per page (default: 16; 64 for latents)")
    parser.add_argument("--quantization", choices=FORMATS, help="how weights are held (default: as config.json says)")


def add_packing(parser: argparse.ArgumentParser) -> None:
    """The option ``--packing``."""
    parser.add_argument(
        "--packing",
        action="store_true",
        help="weights are packed for the kernel that is chosen, so those that need it are ranked with the others",
    )


def served(arguments: argparse.Namespace) -> dict[str, Any]:
    """What these options said, by the names of `problems_of`."""
    return {name: getattr(arguments, name) for name in USUAL}
