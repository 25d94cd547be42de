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
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

from kernelhub.backends.triton import adapters
from kernelhub.backends.triton.concat_adapter import Concat
from kernelhub.backends.triton.merge_adapter import Merge
from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.attention.arguments import Values, lse_shape
from kernelhub.ops.attention.problem import ANY, FEW, MANY, ONE, AttentionProblem, PagedAttentionProblem
from kernelhub.ops.merge.problem import MergeProblem
from kernelhub.ops.mla.problem import ConcatProblem
from kernelhub.probes.device import DeviceFacts, simulated

DEVICES = ("A100", "L40S", "H200", "B200", "RTX5090")

_INSTRUCTIONS = {
    "mma.sync": r"\bmma\.sync",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration: an adapter, facets of its problem, and the features a kernel is compiled with."""

    name: str
    adapter: type[Any]
    facets: dict[str, Any]
    paged: bool = True


_PLAIN: dict[str, Any] = {"head_dim_qk": 128, "head_dim_vo": 128, "num_q_heads": 32, "num_kv_heads": 8}
_FLOAT32: dict[str, Any] = {"q_dtype": "float32", "kv_dtype": "float32"}
_WINDOW: dict[str, Any] = {"causal": True, "window_left": True, "sinks": True}
_EVERYTHING: dict[str, Any] = {
    "causal": True,
    "window_left": True,
    "softcap": True,
    "sinks": True,
    "lse": True,
}


def _width(qk: int, vo: int) -> dict[str, Any]:
    return _PLAIN | {"head_dim_qk": qk, "head_dim_vo": vo}


def cases() -> list[Case]:
    """What is compiled for every device."""
    result = []
    for qk, vo in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
        wide = _width(qk, vo) | {"causal": True}
        result.append(Case(f"prefill {qk}/{vo}", adapters.Prefill, wide | {"q_len": MANY}, paged=False))
        result.append(Case(f"paged prefill {qk}/{vo}", adapters.Prefill, wide | {"q_len": MANY}))
        result.append(Case(f"decode {qk}/{vo}", adapters.SplitKV, _width(qk, vo) | {"q_len": ONE}))
    result += [
        Case("windowed prefill 64/64", adapters.Prefill, _width(64, 64) | _WINDOW | {"q_len": MANY}, paged=False),
        Case("windowed decode 64/64", adapters.SplitKV, _width(64, 64) | _WINDOW | {"causal": False, "q_len": ONE}),
        Case("ragged prefill", adapters.Prefill, _PLAIN | {"causal": True, "ragged": True, "q_len": ANY}, paged=False),
        Case("mixed", adapters.Mixed, _PLAIN | {"causal": True, "ragged": True, "q_len": ANY}),
        Case("prefill, everything", adapters.Prefill, _PLAIN | _EVERYTHING | {"q_len": MANY}),
        Case("decode, everything", adapters.SplitKV, _PLAIN | _EVERYTHING | {"causal": False, "q_len": ONE}),
        Case(
            "prefill fp8", adapters.Prefill, _PLAIN | {"kv_dtype": "float8_e4m3fn", "kv_scale": "head", "q_len": MANY}
        ),
        Case("decode fp8", adapters.SplitKV, _PLAIN | {"kv_dtype": "float8_e4m3fn", "kv_scale": "value", "q_len": ONE}),
        Case("prefill float32", adapters.Prefill, _PLAIN | _FLOAT32 | {"q_len": MANY}),
        Case("decode float32", adapters.SplitKV, _PLAIN | _FLOAT32 | {"q_len": ONE}),
        Case("decode float32 256", adapters.SplitKV, _width(256, 256) | _FLOAT32 | {"q_len": ONE}),
        Case(
            "decode, 64 heads of 256",
            adapters.SplitKV,
            _width(256, 256) | {"num_q_heads": 64, "num_kv_heads": 1, "q_len": ONE},
        ),
        Case("speculative decode", adapters.SplitKV, _PLAIN | {"causal": True, "q_len": FEW}),
        Case("prefill float32 256", adapters.Prefill, _width(256, 256) | _FLOAT32 | {"q_len": MANY}),
        Case("decode, 16 heads a group", adapters.SplitKV, _PLAIN | {"num_kv_heads": 2, "q_len": ONE}),
        Case(
            "decode, 64 heads a group", adapters.SplitKV, _PLAIN | {"num_q_heads": 64, "num_kv_heads": 1, "q_len": ONE}
        ),
        *(
            Case(f"merge of {parts}, {dtype}", Merge, {"parts": parts, "dtype": dtype, "lse": True})
            for parts in ("two", "many")
            for dtype in ("bfloat16", "float32")
        ),
        *(Case(f"concat {dtype}", Concat, {"dtype": dtype}) for dtype in ("bfloat16", "float8_e4m3fn")),
        Case("merge, 192 wide", Merge, {"head_dim": 192, "batched": True}),
        Case("decode, page 3", adapters.SplitKV, _PLAIN | {"page_size": 3, "q_len": ONE}),
    ]
    return result


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


def call(case: Case, device: DeviceFacts) -> None:
    """One launch of the case's adapter with tensors of a serving-sized call."""
    problem_type = PagedAttentionProblem if case.paged else AttentionProblem
    problem = problem_type(device=device, **case.facets)
    q_dtype, kv_dtype = getattr(torch, problem.q_dtype), getattr(torch, problem.kv_dtype)
    heads, kv_heads = problem.num_q_heads, problem.num_kv_heads
    seqs, tokens = 4, 512

    def empty(*shape: int, dtype: torch.dtype = q_dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    offsets = empty(seqs + 1, dtype=torch.int32) if problem.ragged else None
    queries = {ONE: 1, FEW: 8}.get(problem.q_len, tokens)
    rows = (seqs * tokens,) if problem.ragged else (seqs,) if queries == 1 and case.paged else (seqs, queries)
    q = empty(*rows, heads, problem.head_dim_qk)
    if isinstance(problem, PagedAttentionProblem):
        pages = (1024, problem.page_size, kv_heads)
        k, v = empty(*pages, problem.head_dim_qk, dtype=kv_dtype), empty(*pages, problem.head_dim_vo, dtype=kv_dtype)
        table, lengths = empty(seqs, 256, dtype=torch.int32), empty(seqs, dtype=torch.int32)
        step: Any = PagedStep(table, lengths, offsets)
    else:
        kv_rows = (seqs * tokens,) if problem.ragged else (seqs, tokens)
        k = empty(*kv_rows, kv_heads, problem.head_dim_qk, dtype=kv_dtype)
        v = empty(*kv_rows, kv_heads, problem.head_dim_vo, dtype=kv_dtype)
        step = DenseStep(offsets, offsets)
    per_head = empty(kv_heads, dtype=torch.float32) if problem.kv_scale == "head" else None
    scale = 0.5 if problem.kv_scale == "value" else per_head
    values = Values(
        scale=0.1,
        window_left=100 if problem.window_left else -1,
        window_right=0 if problem.causal else -1,
        softcap=30.0 if problem.softcap else 0.0,
        sinks=empty(heads) if problem.sinks else None,
        k_scale=scale,
        v_scale=scale,
    )
    lse = empty(*lse_shape(q.shape), dtype=torch.float32) if problem.lse else None
    case.adapter(problem).launch(q, k, v, step, values, empty(*rows, heads, problem.head_dim_vo), lse)


def merge(case: Case, device: DeviceFacts) -> None:
    """A merge of a chunk of prefill."""
    problem = MergeProblem(device=device, **case.facets)
    rows = (4, 512) if problem.batched else (2048,)
    shape = (*rows, problem.num_heads, problem.head_dim)
    parts = 2 if problem.parts == "two" else 5
    dtype = getattr(torch, problem.dtype)
    outs = torch.empty((parts, *shape), dtype=dtype, device="cuda")
    lses = torch.empty((parts, *lse_shape(shape)), dtype=torch.float32, device="cuda")
    lse = torch.empty(lse_shape(shape), dtype=torch.float32, device="cuda") if problem.lse else None
    case.adapter(problem).launch(outs, lses, torch.empty(shape, dtype=dtype, device="cuda"), lse)


def concat(case: Case, device: DeviceFacts) -> None:
    """The keys of a chunk of prefill."""
    problem = ConcatProblem(device=device, **case.facets)
    heads, nope, rope = problem.num_heads, problem.nope_dim, problem.rope_dim
    dtype = getattr(torch, problem.dtype)
    k_nope = torch.empty(2048, heads, nope + 128, dtype=dtype, device="cuda").narrow(2, 0, nope)
    k_rope = torch.empty(2048, rope, dtype=dtype, device="cuda")
    case.adapter(problem).launch(k_nope, k_rope, torch.empty(2048, heads, nope + rope, dtype=dtype, device="cuda"))


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
        for case in cases():
            if options.case and case.name not in options.case:
                continue
            with compiling_for(device) as launches:
                {Merge: merge, Concat: concat}.get(case.adapter, call)(case, device)
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
