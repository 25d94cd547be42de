"""Compile the Triton launches of real calls for GPUs that are not here, and report what came out.

    python -m tests.backends.triton_ahead [--device H200] [--case NAME] [--table]

Runs the library's own adapters on fake tensors, with a driver that answers only "which target", so tiles,
constants and specialisation are those of a real launch. Prints one JSON object per launch: kernel, device,
shared memory, registers, spilled bytes, and the matrix instructions that were emitted.

It must run in a process without TRITON_INTERPRET, which is why the test starts it as one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

from kernelhub.probes.device import DeviceFacts, simulated
from tests.backends.ahead import attention, fp4_gemm, merge, mla, quant

CASES = (*attention.CASES, *merge.CASES, *mla.CASES, *quant.CASES, *fp4_gemm.CASES)
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


@contextlib.contextmanager
def compiling_for(device: DeviceFacts) -> Iterator[list[tuple[str, Any]]]:
    """Within the block a launch compiles for `device` and is recorded; nothing runs. Tensors are fake."""
    major, minor = device.capability
    launches: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        launches.append((self.fn.__name__, kernel))
        return kernel

    active = triton.runtime.driver.__dict__.get("_active")
    triton.runtime.driver.set_active(Driver(GPUTarget("cuda", 10 * major + minor, 32)))
    JITFunction.run = compile_only
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield launches
    finally:
        JITFunction.run = run
        triton.runtime.driver._active = active


def report(kernel: Any, device: DeviceFacts) -> dict[str, Any]:
    """What the compiler made: resources as ptxas counts them, matrix instructions as the PTX shows them."""
    major, minor = device.capability
    arch = 10 * major + minor
    ptx = kernel.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        gpu = f"sm_{arch}{'a' if arch >= 90 else ''}"
        command = [
            get_ptxas(arch).path,
            "-v",
            f"--gpu-name={gpu}",
            str(source),
            "-o",
            str(Path(folder) / "kernel.cubin"),
        ]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", printed)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", printed)
    return {
        "shared_memory_bytes": kernel.metadata.shared,
        "fits": kernel.metadata.shared <= device.shared_memory_bytes,
        "registers": int(registers[1]) if registers else None,
        "spill_bytes": int(spills[1]) + int(spills[2]) if spills else 0,
        "num_warps": kernel.metadata.num_warps,
        "instructions": [name for name, pattern in _INSTRUCTIONS.items() if re.search(pattern, ptx)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", action="append", help="a simulated device; all of them by default")
    parser.add_argument("--case", action="append", help="a case by name; all of them by default")
    parser.add_argument("--table", action="store_true", help="print a table instead of JSON lines")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        sys.exit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    for name in options.device or DEVICES:
        device = simulated(name)
        for case in CASES:
            if options.case and case.name not in options.case:
                continue
            with compiling_for(device) as launches:
                case.launch(device)
            for kernel_name, kernel in launches:
                row = {"device": name, "case": case.name, "kernel": kernel_name, **report(kernel, device)}
                if options.table:
                    shared = f"{row['shared_memory_bytes'] >> 10:>4}K{'' if row['fits'] else ' OVER'}"
                    print(
                        f"{name:8} {case.name:26} {kernel_name:15} {shared:10} {row['registers']:>4} regs"
                        f" {row['spill_bytes']:>5} spilled  {' '.join(row['instructions'])}",
                        flush=True,
                    )
                else:
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
