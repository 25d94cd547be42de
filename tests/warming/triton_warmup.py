"""Warm up, seal and fuzz a model with Triton's real compiler, for a GPU that is not here; nothing is launched.

    python -m tests.warming.triton_warmup FOLDER MODEL SETTING

The kernels of Triton that an H200 would take run public calls on CPU tensors. Prints one JSON object. It must run in a
process without TRITON_INTERPRET, which is why the test starts it as one; `FOLDER` keeps what is compiled, `SETTING` is
JSON, as of `problems_of`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import types
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_CACHE_DIR"] = sys.argv[1]
    os.environ["KERNELHUB_CACHE_DIR"] = sys.argv[1]

import kernelhub
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Backend, Band, Kernel
from kernelhub.dispatch.load import load_attribute
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import NotWarmed
from kernelhub.ops.models.problems import problems_of
from kernelhub.probes.device import simulated
from tests.dispatch.backends import EVERYWHERE
from tests.runtime.triton_traffic import launch_nothing
from tests.warming.traffic import Server

H200 = simulated("H200")
MACHINE = SimulatedMachine({"torch": "2.13.0", "triton": "3.7.1"})
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MAX_LEN = 4096


def ahead(op: str) -> Any:
    """What makes the adapter that an H200 would take of Triton's kernels."""

    def make(problem: Any) -> Any:
        there = dataclasses.replace(problem, device=H200)
        selection = HUB.function(op).op.select(there, ("triton",), MACHINE)
        assert selection.kernel is not None, selection
        return load_attribute(selection.kernel.target, 60.0)(there)

    return make


def register(ops: set[str]) -> None:
    _ = HUB.settings
    kernels = []
    for op in sorted(ops):
        schema = HUB.registry.contracts[op].schema
        globals()[f"make_{op}"] = ahead(op)
        kernels.append(
            Kernel(
                op=op,
                name="ahead.k",
                target=f"tests.warming.triton_warmup:make_{op}",
                summary="compiled, not launched",
                band=Band.PLUGIN,
                standings=EVERYWHERE,
                constraints=(anything(*schema.structural),),
                features=schema.features,
            )
        )
    kernelhub.register_backend(types.SimpleNamespace(BACKEND=Backend("ahead", "compiles"), KERNELS=tuple(kernels)))


def main() -> None:
    model, setting = sys.argv[2], json.loads(sys.argv[3])
    launch_nothing()
    register({need.op for need in problems_of(model, **setting)})
    # A GPU's counts, where every tile of products is met.
    options = {"context_len": 300, "max_context_len": MAX_LEN, "device": "cpu", "verify": False}
    done = kernelhub.warmup(model, token_counts=COUNTS, **options, **setting)
    compiled = sum(item.kind == "compile" for item in kernelhub.report().work)
    told: dict[str, Any] = {
        "failures": [str(item) for item in done.failures],
        "kernels": sorted({item.kernel for item in done.items}),
        "compiled": compiled,
        "by": sorted({str(item.op) for item in kernelhub.report().work if item.kind == "compile"}),
        "how": done.counts,
        "refused": [],
        "calls": 0,
    }
    server = Server(model, "cpu", max(COUNTS), MAX_LEN, **setting)
    with kernelhub.seal():
        for seed in range(300):
            try:
                server.run(random.Random(seed))
                told["calls"] += 1
            except NotWarmed as error:
                told["refused"].append(f"{seed}: {error.kind} {error.what}: {error.line}")
        told["after_seal"] = len(kernelhub.report().after_seal)
    told["more"] = sum(item.kind == "compile" for item in kernelhub.report().work) - compiled
    print(json.dumps(told))


if __name__ == "__main__":
    sys.modules["tests.warming.triton_warmup"] = sys.modules["__main__"]
    main()
