"""Every kernel of quantised matrix products that can run here, against torch's ways and against the machine's roofs.

    python benchmarks/gemm.py [--quick] [--json] [--out FILE] [--plot FILE.png] [--show FILE]

For each case all kernels that accept it are timed in turn with what torch offers for the same layer: weights made
bfloat16 beforehand, twice the memory, and weights made bfloat16 at each call. torch's own float8 operators are kernels
here. Calls go round through as many copies of the weights as fill four times a CPU's last cache, since a model's
layers do the same; on a GPU the cache is flushed between calls.

The roofs are those of benchmarks/attention.py, and float8 operations per second of a large product where the GPU
multiplies float8. A case's time at the roof is the larger of its bytes over the first and its operations over the rate
of its format. A family of ops adds a function to FAMILIES.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from attention import host_us, plot, roofs, show
from torch import Tensor

import kernelhub
from kernelhub.cli.measure import time_calls
from kernelhub.ops.gemm.fp8.batched.inputs import MODELS as PROJECTIONS
from kernelhub.ops.gemm.fp8.batched.inputs import AbsorbedProjection, bmm_fp8_inputs
from kernelhub.ops.gemm.fp8.inputs import MODELS as LAYERS
from kernelhub.ops.gemm.fp8.inputs import LinearLayer, fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.scaling import dequantised
from kernelhub.ops.gemm.fp8.tolerance import compare
from kernelhub.probes.device import facts

_CACHE_BYTES = 32 << 20  # of a CPU's last cache; more copies than needed do no harm
Peer = Callable[[dict[str, Any]], Tensor]


@dataclass(frozen=True)
class Case:
    """One call to time.

    Attributes:
        label: shown and stored.
        op: name of the op.
        operands: arguments of the call, several times the same in memory of their own; with an underscore before the
            name, what only peers take.
        peers: torch's ways of computing the same, by name, each from one of `operands`.
        agrees: whether a result is right for one of `operands`.
        bytes: that must move.
        operations: multiplications and additions that must be done.
        rate: the roof that operations are held against.
    """

    label: str
    op: str
    operands: list[dict[str, Any]]
    peers: dict[str, Peer]
    agrees: Callable[[Tensor, dict[str, Any]], bool]
    bytes: int
    operations: int
    rate: str = "float8_operations_per_s"


@functools.lru_cache(maxsize=1)
def operands_of(layer: LinearLayer, scaling: str, device: torch.device) -> dict[str, Any]:
    """Arguments of `fp8_gemm` with as many rows as any case has, and both matrices in bfloat16."""
    most = 256 if device.type == "cpu" else 4096
    call = fp8_gemm_inputs(tokens=most, n=layer.n, k=layer.k, scaling=scaling, device=device)
    rows = 128 if scaling == "block" else 1
    left = dequantised(call["a"], call["a_scale"], scaling, 1, torch.float32).bfloat16()
    right = dequantised(call["b"], call["b_scale"], scaling, rows, torch.float32).bfloat16()
    return {**call, "_a": left, "_b": right}


def linear(layer: LinearLayer, tokens: int, scaling: str, device: torch.device) -> Case:
    """`fp8_gemm` of one layer."""
    call = dict(operands_of(layer, scaling, device))
    for name in ("a", "_a", "a_scale"):
        if call[name].ndim:
            call[name] = call[name][:tokens]
    b_scale = call["b_scale"]

    def in_bfloat16(operands: dict[str, Any]) -> Tensor:
        return operands["_a"] @ operands["_b"].t()

    def made_bfloat16(operands: dict[str, Any]) -> Tensor:
        weights = operands["b"].to(torch.bfloat16)
        if scaling == "block":
            tiles = operands["b_scale"].bfloat16().repeat_interleave(128, 0)[: layer.n]
            weights = weights * tiles.repeat_interleave(128, 1)[:, : layer.k]
        else:
            weights = weights * operands["b_scale"].bfloat16()
        return operands["_a"] @ weights.t()

    peers: dict[str, Peer] = {"bfloat16 weights": in_bfloat16}
    if scaling != "mx":
        peers["weights made bfloat16 in the call"] = made_bfloat16
    return Case(
        f"{layer.name} {layer.n} x {layer.k}, scaled by {scaling}, {tokens} rows",
        "fp8_gemm",
        _copies(call, device),
        peers,
        lambda out, operands: _right(kernelhub.fp8_gemm, out, operands, device),
        bytes=tokens * layer.k + layer.n * layer.k + 2 * tokens * layer.n + b_scale.numel() * b_scale.itemsize,
        operations=2 * tokens * layer.n * layer.k,
    )


def batched(projection: AbsorbedProjection, tokens: int, device: torch.device) -> Case:
    """`bmm_fp8` of one absorbed projection."""
    heads, n, k = projection.heads, projection.n, projection.k
    call = bmm_fp8_inputs(batch=heads, tokens=tokens, n=n, k=k, device=device)
    wide = {f"_{name}": call[name].to(torch.bfloat16) for name in ("a", "b")}
    return Case(
        f"{projection.name}, {heads} x {n} x {k}, {tokens} rows",
        "bmm_fp8",
        _copies({**call, **wide}, device),
        {"bfloat16 weights": lambda operands: torch.bmm(operands["_a"], operands["_b"].transpose(1, 2))},
        lambda out, operands: _right(kernelhub.bmm_fp8, out, operands, device),
        bytes=heads * (tokens * k + n * k + 2 * tokens * n),
        operations=2 * heads * tokens * n * k,
    )


def fp8_cases(device: torch.device, quick: bool) -> Iterator[Callable[[], Case]]:
    """Small enough for a CPU, or as an engine runs them on a GPU."""
    if device.type == "cpu":
        plans = [("deepseek-v3.2 down / 8", "block", (1, 16) if quick else (1, 16, 256))]
        if not quick:
            plans += [("deepseek-v3.2 down / 8", "mx", (16,)), ("qwen3-30b-a3b qkv", "row", (1, 16))]
    else:
        few, many = (1, 64, 4096), (1, 4, 16, 64, 128, 256, 1024, 4096)
        plans = [("deepseek-v3.2 down / 8", "block", few if quick else many)]
        plans += [("llama-3.1-70b o", scaling, few) for scaling in ("row", "tensor")]
        if not quick:
            for name in ("q_b", "down", "kv_a"):
                plans.append((f"deepseek-v3.2 {name}", "block", many))
            plans += [("qwen3-30b-a3b qkv", "block", many), ("qwen3-30b-a3b o", "block", (16, 1024))]
            plans += [("llama-3.1-70b qkv", scaling, (16, 256, 1024)) for scaling in ("row", "tensor")]
            plans.append(("deepseek-v3.2 down / 8", "mx", (16, 1024)))
    for name, scaling, sizes in plans:
        for tokens in sizes:
            yield lambda name=name, s=scaling, m=tokens: linear(LAYERS[name], m, s, device)


def batched_cases(device: torch.device, quick: bool) -> Iterator[Callable[[], Case]]:
    """Absorbed projections of decode, and on a GPU of a large batch of it."""
    for name in ("deepseek-v3.2 q to latent", "deepseek-v3.2 latent to v"):
        for tokens in (16,) if quick or device.type == "cpu" else (1, 16, 128, 512):
            yield lambda name=name, tokens=tokens: batched(PROJECTIONS[name], tokens, device)


FAMILIES = (fp8_cases, batched_cases)


def float8_roof(device: torch.device, roof: dict[str, float], budget_s: float) -> float:
    """float8 operations per second of a large product; of bfloat16 where the device multiplies no float8."""
    if device.type == "cpu" or torch.cuda.get_device_capability(device) < (8, 9):
        return roof["operations_per_s"]
    rows = 8192
    a, b = (torch.randn(rows, 4096, device=device).to(torch.float8_e4m3fn) for _ in "ab")
    one = torch.ones((), device=device)
    call = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)  # noqa: E731
    (timing,) = time_calls((call,), device, budget_s)
    return 2 * rows * 4096 * rows / timing.median_s


def measure(case: Case, device: torch.device, budget_s: float, roof: dict[str, float]) -> dict[str, Any]:
    """Milliseconds of every kernel that accepts the case, of torch's ways, and at the roof."""
    function = getattr(kernelhub, case.op)
    first = case.operands[0]
    verdict = function.explain(**_arguments(first))
    able = [decision.kernel for decision in verdict.decisions if decision.accepted]
    for name in able:
        assert case.agrees(function(**_arguments(first), backend=name), first), f"{case.label}: {name} is wrong"

    def call(name: str) -> Callable[[], Tensor]:
        round_trip = itertools.cycle([_arguments(operands) for operands in case.operands])
        return lambda: function(**next(round_trip), backend=name)

    def peer(way: Peer) -> Callable[[], Tensor]:
        round_trip = itertools.cycle(case.operands)
        return lambda: way(next(round_trip))

    kernels = {name: call(name) for name in able}
    timings = time_calls([*kernels.values(), *map(peer, case.peers.values())], device, budget_s)
    ms = [1e3 * timing.median_s for timing in timings]
    return {
        "case": case.label,
        "op": case.op,
        "chosen": verdict.selected,
        "kernels_ms": dict(zip(kernels, ms[: len(kernels)], strict=True)),
        "torch_ms": dict(zip(case.peers, ms[len(kernels) :], strict=True)),
        "roof_ms": 1e3 * max(case.bytes / roof["bytes_per_s"], case.operations / roof[case.rate]),
        "host_us": {name: host_us(kernels[name]) for name in kernels} if device.type == "cuda" else {},
    }


def _arguments(operands: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in operands.items() if not name.startswith("_")}


def _copies(operands: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """The same operands in memory of their own, until b's copies fill four times a CPU's last cache."""
    count = 1 if device.type != "cpu" else 1 + 4 * _CACHE_BYTES // operands["b"].numel()
    weights = ("b", "_b", "b_scale")
    return [
        operands if i == 0 else {**operands, **{name: operands[name].clone() for name in weights}}
        for i in range(min(count, 12))
    ]


def _right(function: Any, out: Tensor, operands: dict[str, Any], device: torch.device) -> bool:
    """Held against the reference, of at most 64 rows and 512 columns of a large result."""
    some = _arguments(operands)
    if some["b"].ndim == 2 and out.numel() > 1 << 20:
        some["a"], out = some["a"][:64], out[:64]
        if some["a_scale"].ndim:
            some["a_scale"] = some["a_scale"][:64]
    return compare(out, function.reference, some, matrix_instructions=device.type == "cuda").ok


def run(quick: bool) -> dict[str, Any]:
    """Measure every case on the first GPU, or else on the CPU."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    budget_s = 0.3 if quick or device.type == "cuda" else 1.0
    with torch.no_grad():
        roof = roofs(device, budget_s)
        roof["float8_operations_per_s"] = float8_roof(device, roof, budget_s)
        makers = [make for family in FAMILIES for make in family(device, quick)]
        rows = [measure(make(), device, budget_s, roof) for make in makers]
    return {
        "device": str(facts(device)),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "roofs": roof,
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases, shorter measurements")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--show", dest="shown", type=Path, help="show this JSON of an earlier run; measure nothing")
    parser.add_argument("--plot", type=Path, help="also draw the result into this file")
    options = parser.parse_args()
    result = json.loads(options.shown.read_text()) if options.shown else run(options.quick)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        plot(result["rows"], f"{result['device']}, torch {result['torch']}, {result['date']}", options.plot)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        roof = result["roofs"]
        print(
            f"{result['device']}: reads {roof['bytes_per_s'] / 1e9:,.0f} GB/s, "
            f"{roof['operations_per_s'] / 1e9:,.0f} GFLOP/s in bfloat16, "
            f"{roof['float8_operations_per_s'] / 1e9:,.0f} in float8"
        )
        show(result["rows"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
