"""A child process that compiles items: it reads items, prepares them, and reports the results, one line of JSON each.

`warming.jobs` starts it with its own module search path. Results go to the original standard output; output of
libraries goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from kernelhub.dispatch.work import JOURNAL
from kernelhub.ops.models.problems import Need
from kernelhub.warming.ready import Sizing, make_ready
from kernelhub.warming.wanted import Item


def order_for(item: Item, kernel: str, device: torch.device, sizing: Sizing) -> str:
    """An item as a line for a child."""
    assert item.need is not None
    fields = {
        "need": item.need.to_dict(),
        "tokens": item.tokens,
        "kernel": kernel,
        "device": str(device),
        "sizing": [sizing.context_len, sizing.max_context_len],
        "packing": item.packing,
    }
    return json.dumps(fields)


def main() -> None:
    """Process items until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    JOURNAL.shown += 1  # by the process that asks
    for line in sys.stdin:
        fields: dict[str, Any] = json.loads(line)
        item = Item(
            Need.from_dict(fields["need"]), tuple(fields["tokens"]), fields["kernel"] or None, packing=fields["packing"]
        )
        outcome = make_ready(item, torch.device(fields["device"]), Sizing(*fields["sizing"]))
        print(json.dumps(outcome.to_dict()), file=answers, flush=True)
