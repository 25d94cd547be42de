"""Compile the Triton launches of real calls for GPUs that are not here, and report what came out.

    python -m tests.backends.triton_ahead [--device H200] [--case NAME] [--once] [--table]

Runs the library's own adapters on fake tensors, with a driver that answers only "which target", so tiles,
constants and specialisation are those of a real launch. Prints one JSON object per launch: op and kernel record,
compiled function, device, shared memory, registers, spilled bytes, and the matrix instructions that were emitted.

It must run in a process without TRITON_INTERPRET, which is why the test starts it as one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from kernelhub.dispatch.hub import HUB
from kernelhub.ops import functions
from kernelhub.ops.operands import check_eager
from kernelhub.probes.device import DeviceFacts, simulated
from tests.backends import ahead
from tests.backends.ahead.once import ONCE

CASES = tuple(
    case
    for family in pkgutil.iter_modules(ahead.__path__)
    for case in getattr(importlib.import_module(f"{ahead.__name__}.{family.name}"), "CASES", ())
)
DEVICES = ("A100", "L40S", "H200", "B200", "RTX5090")

_INSTRUCTIONS = {
    "mma.sync": r"\bmma\.sync",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
}


class Driver:
    """Stands in for Triton's CUDA driver and knows the target only."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return f"{self._target.backend}{self._target.arch}"

    def get_current_stream(self, device: Any) -> int:
        return 0


def _keeping_its_log(make_cubin: Callable[..., bytes]) -> Callable[..., bytes]:
    """ptxas run as Triton runs it, what it printed kept with the kernel, also in Triton's cache."""

    def made(self: Any, source: str, metadata: dict[str, Any], *more: Any) -> bytes:
        printed = io.StringIO()
        with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(printed):
            triton.knobs.nvidia.dump_ptxas_log = True
            cubin = make_cubin(self, source, metadata, *more)
        metadata["ptxas_log"] = printed.getvalue()
        return cubin

    return made


_LAUNCHERS = tuple(f"kernelhub.backends.{name}.launch" for name in ("triton", "gluon"))


@contextlib.contextmanager
def compiling_for(device: DeviceFacts) -> Iterator[list[tuple[dict[str, Any], Any]]]:
    """Within the block a launch compiles for `device` and is recorded; nothing runs. Tensors are fake."""
    major, minor = device.capability
    launches: list[tuple[dict[str, Any], Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        op, record = launched_by(sys._getframe(1))
        constants = {name: value for name, value in kwargs.items() if isinstance(value, int)}
        launches.append(({"op": op, "record": record, "kernel": self.fn.__name__, "constants": constants}, kernel))
        return kernel

    # Launchers refuse to launch while torch's modes replace memory by none, as they do here.
    checking: list[Any] = [importlib.import_module(name) for name in _LAUNCHERS]
    active = triton.runtime.driver.__dict__.get("_active")
    make_cubin = CUDABackend.make_cubin
    triton.runtime.driver.set_active(Driver(GPUTarget("cuda", 10 * major + minor, 32)))
    JITFunction.run = compile_only
    CUDABackend.make_cubin = _keeping_its_log(make_cubin)
    try:
        # In a folder of its own: what others compiled comes without a log.
        with triton.knobs.cache.scope(), FakeTensorMode(allow_non_fake_inputs=True):
            triton.knobs.cache.dir = str(Path(triton.knobs.cache.dir) / "kernelhub_ahead")
            for module in checking:
                module.check_eager = lambda name: None
            yield launches
    finally:
        for module in checking:
            module.check_eager = check_eager
        JITFunction.run = run
        CUDABackend.make_cubin = make_cubin
        triton.runtime.driver._active = active


@functools.cache
def records() -> dict[str, list[tuple[type, str, str]]]:
    """By target of a kernel record: the problem, op and name of those that have it."""
    _ = HUB.settings
    found: dict[str, list[tuple[type, str, str]]] = {}
    for contract in (function.op.contract for function in functions()):
        for kernel in HUB.registry.candidates(contract.name).kernels:
            found.setdefault(kernel.target, []).append((contract.problem, contract.name, kernel.name))
    return found


def launched_by(frame: FrameType | None) -> tuple[str | None, str | None]:
    """Op and kernel record of the adapter that is launching, the nearest on the stack; None if none is."""
    while frame is not None:
        adapter = frame.f_locals.get("self")
        for problem, op, name in records().get(f"{type(adapter).__module__}:{type(adapter).__qualname__}", ()):
            if type(getattr(adapter, "problem", None)) is problem:
                return op, name
        frame = frame.f_back
    return None, None


def lost_constants(ttir: str) -> list[str]:
    """Constants of bfloat16 that Triton 3.6 and 3.7 change, since they make them by way of float16.

    Below the normal numbers of float16 they lose bits: 2^-16 becomes 63/64 of it.
    """
    found = re.findall(r"arith\.constant (?:dense<)?([-+.0-9e]+)>? : (?:tensor<[0-9x]+x)?bf16", ttir)
    return [text for text in found if 0 < abs(float(text)) < 2**-14]


def report(kernel: Any, device: DeviceFacts) -> dict[str, Any]:
    """What the compiler made: resources as ptxas counts them, matrix instructions as the PTX shows them."""
    printed = kernel.metadata.ptxas_log
    registers = re.search(r"Used (\d+) registers", printed)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", printed)
    return {
        "shared_memory_bytes": kernel.metadata.shared,
        "fits": kernel.metadata.shared <= device.shared_memory_bytes,
        "registers": int(registers[1]) if registers else None,
        "spill_bytes": int(spills[1]) + int(spills[2]) if spills else 0,
        "lost_constants": lost_constants(kernel.asm["ttir"]),
        "num_warps": kernel.metadata.num_warps,
        "instructions": [name for name, pattern in _INSTRUCTIONS.items() if re.search(pattern, kernel.asm["ptx"])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", action="append", help="a simulated device; all of them by default")
    parser.add_argument("--case", action="append", help="a case by name; all of them by default")
    parser.add_argument("--once", action="store_true", help="the cases in which each kernel is launched once")
    parser.add_argument("--table", action="store_true", help="print a table instead of JSON lines")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        sys.exit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    for name in options.device or DEVICES:
        device = simulated(name)
        for case in CASES:
            if (options.case and case.name not in options.case) or (options.once and case.name not in ONCE):
                continue
            with compiling_for(device) as launches:
                case.launch(device)
            for launched, kernel in launches:
                row = {"device": name, "case": case.name, **launched, **report(kernel, device)}
                if options.table:
                    shared = f"{row['shared_memory_bytes'] >> 10:>4}K{'' if row['fits'] else ' OVER'}"
                    print(
                        f"{name:8} {case.name:26} {row['kernel']:15} {shared:10} {row['registers']:>4} regs"
                        f" {row['spill_bytes']:>5} spilled  {' '.join(row['instructions'])}",
                        flush=True,
                    )
                else:
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
