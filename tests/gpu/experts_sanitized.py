"""Few small calls of Gluon's experts, for a run under compute-sanitizer; each result is compared.

    compute-sanitizer --tool memcheck python -m tests.gpu.experts_sanitized [--seconds S]

Prints one JSON object after each layer, in which `wrong` lists the calls whose results are not the reference's. Each
call is made twice, since the second is made by the launcher alone. Run it once without the sanitizer before, so that
Triton finds its kernels compiled.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch

import kernelhub
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.problem import FP8_BLOCK, PLAIN
from kernelhub.ops.moe.experts.tolerance import compare

KERNELS = {FP8_BLOCK: "gluon.experts", PLAIN: "gluon.experts_halves"}
SMALL: dict[str, Any] = {"num_experts": 16, "top_k": 4, "hidden_size": 512, "intermediate_size": 256}
LAYERS: dict[str, dict[str, Any]] = {
    "small": SMALL,
    "as wide as Qwen3's": SMALL | {"top_k": 8, "hidden_size": 2048, "intermediate_size": 768},
}
TOKENS = (1, 33, 300)  # tiles of few rows, of several experts, and of 64 or 128 rows


def wrong_of(weights: str, layer: dict[str, Any], tokens: int) -> list[str]:
    """What was wrong in two calls."""
    arguments = moe_inputs(tokens=tokens, weights=weights, device="cuda", **layer)
    found = []
    for call in ("first", "again"):
        out = torch.full_like(arguments["x"], torch.nan)
        kernelhub.fused_moe(**arguments, out=out, backend=KERNELS[weights])
        agreement = compare(out, arguments)
        if not agreement.ok:
            found.append(f"{tokens} tokens, {call}: {agreement}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1e9, help="no layer begins later")
    options = parser.parse_args()
    began = time.monotonic()
    failed = False
    for name, layer in LAYERS.items():
        for weights, kernel in KERNELS.items():
            if time.monotonic() - began > options.seconds:
                print(json.dumps({"kernel": kernel, "layer": name, "skipped": "no time left"}), flush=True)
                continue
            wrong = [one for tokens in TOKENS for one in wrong_of(weights, layer, tokens)]
            torch.cuda.synchronize()
            failed |= bool(wrong)
            row = {"kernel": kernel, "layer": name, "calls": 2 * len(TOKENS), "wrong": wrong}
            print(json.dumps({**row, "ended_s": round(time.monotonic() - began, 1)}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
