"""A GPU that is none, for what a call costs the host: Triton compiles for it, and launches enter a stub of the driver.

Tensors are in CPU memory, and every op believes that it is on an H200. So the Python of the ops, the checks, the
adapters and the launcher run as on a GPU. What the driver and torch's allocator of GPU memory take is missing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from kernelhub.backends.gluon import launch as of_gluon
from kernelhub.backends.shared import direct
from kernelhub.backends.triton import launch as of_triton
from kernelhub.dispatch.hub import HUB
from kernelhub.runtime import launch as runtime
from tests.backends.launching.stub import Stub, install

_DEVICE = 0


def install_stub(late: bool = False) -> str:
    """Make Triton and the launcher use the stub; returns what it is. `late`: the first launch loads the launcher."""
    stub = Stub()
    install(stub, 90)
    stub.expect([])  # it looks at no parameter
    memory = torch.empty(64 << 20, dtype=torch.uint8, device="cpu").data_ptr()
    native = stub.native(
        **runtime.as_graphs(stub.library, runtime.GRAPH_AFTER if HUB.settings["KERNELHUB_LAUNCH_GRAPHS"] else 0),
        stream_of=int,  # of a device, by a function of C, as torch's own is
        current=_DEVICE.conjugate,
        allocate=lambda size, stream: memory,
        release=None,
        counters=lambda device, stream: memory,
    )
    recognised: list[bool] = []

    def loaded() -> runtime.Native:
        if not recognised:
            recognised.append(True)
            runtime.recognise_in_c(native)
        return native

    runtime.native = loaded
    if not late:
        loaded()

    def made(compiled: Any, given: int, **options: Any) -> Any:
        return direct.direct_launch(compiled, given, sizes=lambda function, most: _sizes(compiled, given), **options)

    of_triton.direct_launch = of_gluon.direct_launch = made
    return "stub of the driver"


def _sizes(compiled: Any, given: int) -> list[int]:
    """The parameters of a function, as Triton's signature says: there is no driver that could tell."""
    signature = list(compiled.src.signature.values())
    kinds = "".join(filter(None, map(direct._kind, signature[:given])))
    maps = direct._maps(compiled.metadata, signature)
    return [*direct._parameters(kinds, maps or ()), *[8] * direct._SCRATCH]
