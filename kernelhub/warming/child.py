"""A process that compiles items for another one: it reads items, makes them ready, and tells how, a line of JSON each.

`warming.jobs` starts it, with the module search path of the process that asks. Answers go to the standard output that
it was started with; whatever libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from kernelhub.ops.models.problems import Need
from kernelhub.warming.ready import Sizing, make_ready
from kernelhub.warming.wanted import Item


def order_for(item: Item, kernel: str, device: torch.device, sizing: Sizing) -> str:
    """An item as a line for a child."""
    assert item.need is not None
    told = {
        "need": item.need.to_dict(),
        "tokens": item.tokens,
        "kernel": kernel,
        "device": str(device),
        "sizing": [sizing.context_len, sizing.max_context_len],
        "packing": item.packing,
    }
    return json.dumps(told)


def main() -> None:
    """Serve items until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        told: dict[str, Any] = json.loads(line)
        item = Item(
            Need.from_dict(told["need"]), tuple(told["tokens"]), told["kernel"] or None, packing=told["packing"]
        )
        outcome = make_ready(item, torch.device(told["device"]), Sizing(*told["sizing"]))
        print(json.dumps(outcome.to_dict()), file=answers, flush=True)
