"""Every kernel of quantised matrix products that can run here, against torch's ways and against the machine's roofs.

    python benchmarks/gemm.py [--quick] [--json] [--out FILE] [--plot FILE.png] [--show FILE]

For each case all kernels that accept it are timed in turn with what torch offers for the same layer: weights made
bfloat16 beforehand, twice the memory, and weights made bfloat16 at each call. torch's own float8 operators are kernels
here. Calls go round through as many copies of the weights as fill four times a CPU's last cache, since a model's
layers do the same; on a GPU the cache is flushed between calls.

How kernels are timed and what the roofs are: roofline.py. A family of ops adds a function to FAMILIES.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from roofline import Case, main
from torch import Tensor

import kernelhub
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp4.problem import MXFP4
from kernelhub.ops.gemm.fp4.tolerance import error_allowed
from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.scaling import dequantised
from kernelhub.ops.gemm.fp8.tolerance import compare
from kernelhub.ops.models.shapes import ABSORBED, FP4_LAYERS, FP8_LAYERS, AbsorbedProjection, Fp4Layer, LinearLayer

_CHECKED = 64  # rows of a float4 product
_CACHE_BYTES = 32 << 20  # of a CPU's last cache; more copies than needed do no harm
Peer = Callable[[dict[str, Any]], Tensor]


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
    return _case(
        f"{layer.name} {layer.n} x {layer.k}, scaled by {scaling}, {tokens} rows",
        kernelhub.fp8_gemm,
        call,
        peers,
        device,
        bytes=tokens * layer.k + layer.n * layer.k + 2 * tokens * layer.n + b_scale.numel() * b_scale.itemsize,
        operations=2 * tokens * layer.n * layer.k,
    )


def batched(projection: AbsorbedProjection, tokens: int, device: torch.device) -> Case:
    """`bmm_fp8` of one absorbed projection."""
    heads, n, k = projection.heads, projection.n, projection.k
    call = bmm_fp8_inputs(batch=heads, tokens=tokens, n=n, k=k, device=device)
    wide = {f"_{name}": call[name].to(torch.bfloat16) for name in ("a", "b")}
    return _case(
        f"{projection.name}, {heads} x {n} x {k}, {tokens} rows",
        kernelhub.bmm_fp8,
        {**call, **wide},
        {"bfloat16 weights": lambda operands: torch.bmm(operands["_a"], operands["_b"].transpose(1, 2))},
        device,
        bytes=heads * (tokens * k + n * k + 2 * tokens * n),
        operations=2 * heads * tokens * n * k,
    )


def fp8_cases(device: torch.device, quick: bool) -> Iterator[Callable[[], Case]]:
    """Small enough for a CPU, or as an engine runs them on a GPU."""
    if device.type == "cpu":
        plans = [("deepseek-v3.2 down / 8", "block", (1, 16) if quick else (1, 4, 16, 64, 256))]
        if not quick:
            plans += [("deepseek-v3.2 down / 8", "mx", (16, 256)), ("qwen3-30b-a3b qkv", "row", (1, 16, 256))]
            plans += [("glm-5 o", "block", (1, 16)), ("minimax-m2.5 o", "block", (1, 16))]
    else:
        few, many = (1, 64, 4096), (1, 16, 64, 128, 1024, 4096)
        plans = [("deepseek-v3.2 down / 8", "block", few if quick else many)]
        plans += [("llama-3.1-70b o", scaling, few) for scaling in ("row", "tensor")]
        if not quick:
            for name in ("q_b", "down", "kv_a"):
                plans.append((f"deepseek-v3.2 {name}", "block", many))
            plans += [("glm-5 o", "block", (16, 4096)), ("minimax-m2.5 o", "block", (16, 4096))]
            plans += [("qwen3-30b-a3b qkv", "block", many), ("qwen3-30b-a3b o", "block", (16, 1024))]
            plans += [("llama-3.1-70b qkv", scaling, (16, 256, 1024)) for scaling in ("row", "tensor")]
            plans.append(("deepseek-v3.2 down / 8", "mx", (16, 1024)))
    for name, scaling, sizes in plans:
        for tokens in sizes:
            yield lambda name=name, s=scaling, m=tokens: linear(FP8_LAYERS[name], m, s, device)


def batched_cases(device: torch.device, quick: bool) -> Iterator[Callable[[], Case]]:
    """Absorbed projections of decode, and on a GPU of a large batch of it."""
    for name in ("deepseek-v3.2 q to latent", "deepseek-v3.2 latent to v"):
        for tokens in (16,) if quick or device.type == "cpu" else (1, 16, 128, 512):
            yield lambda name=name, tokens=tokens: batched(ABSORBED[name], tokens, device)


def narrow(layer: Fp4Layer, tokens: int, device: torch.device) -> Case:
    """`fp4_gemm` of one layer: bfloat16 activations, weights as published in float4."""
    call = fp4_gemm_inputs(tokens=tokens, n=layer.n, k=layer.k, b_format=layer.b_format, device=device)
    scales = (call["b_scale"],) if layer.b_format == MXFP4 else (call["b_scale"], call["b_global_scale"])
    widen = kernelhub.dequantize_mxfp4 if layer.b_format == MXFP4 else kernelhub.dequantize_nvfp4
    wide = widen(call["b"], *scales)
    return _case(
        f"{layer.name} {layer.n} x {layer.k}, {layer.b_format}, {tokens} rows",
        kernelhub.fp4_gemm,
        {**call, "_b": wide},
        {"bfloat16 weights": lambda operands: operands["a"] @ operands["_b"].t()},
        device,
        bytes=2 * tokens * (layer.k + layer.n) + sum(t.numel() * t.itemsize for t in (call["b"], *scales)),
        operations=2 * tokens * layer.n * layer.k,
        right=lambda out: _narrow_right(out[:_CHECKED], call["a"][:_CHECKED], wide),
        float8=False,
    )


def _narrow_right(out: Tensor, a: Tensor, wide: Tensor) -> bool:
    """float4 codes times their scales are bfloat16 numbers but for the last bits of the scales' product."""
    want = a.double() @ wide.double().t()
    sizes = a.double().abs() @ wide.double().abs().t()
    allowed = error_allowed(want, sizes, a.shape[1], out.dtype) + 2.0**-8 * sizes
    return bool(((out.double() - want).abs() <= allowed).all())


def fp4_cases(device: torch.device, quick: bool) -> Iterator[Callable[[], Case]]:
    """Layers of experts and of attention, few rows and many."""
    names = ("gpt-oss-120b expert gate_up", "glm-5 expert gate_up")
    if device.type == "cpu":
        sizes: tuple[int, ...] = (16,) if quick else (16, 256)
    else:
        sizes = (16, 4096) if quick else (1, 16, 64, 256, 4096)
    if not quick:
        names += ("minimax-m2.5 expert gate_up", "qwen3-30b-a3b qkv") if device.type == "cpu" else tuple(FP4_LAYERS)
    for name in dict.fromkeys(names):
        for tokens in sizes:
            yield lambda name=name, tokens=tokens: narrow(FP4_LAYERS[name], tokens, device)


FAMILIES = (fp8_cases, batched_cases, fp4_cases)


def _case(
    label: str,
    function: Any,
    operands: dict[str, Any],
    peers: dict[str, Peer],
    device: torch.device,
    bytes: int,
    operations: int,
    right: Callable[[Tensor], bool] | None = None,
    float8: bool = True,
) -> Case:
    """A call, with peers that take the same operands in turn; an underscore marks what only peers take."""
    first, *rest = copies = _copies(operands, device)
    right = right or (lambda out: _right(function, out, first, device))

    def in_turn(way: Peer) -> Callable[[], Tensor]:
        round_trip = itertools.cycle(copies)
        return lambda: way(next(round_trip))

    return Case(
        label,
        function.op.contract.name,
        _arguments(first),
        {name: in_turn(way) for name, way in peers.items()},
        bytes=bytes,
        operations=operations,
        disagreement=lambda out, _: 0.0 if right(out) else float("inf"),
        float8=float8,
        copies=[_arguments(copy) for copy in rest],
    )


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


def cases(device: torch.device, quick: bool) -> list[Callable[[], Case]]:
    """Those of every family."""
    return [make for family in FAMILIES for make in family(device, quick)]


if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], cases))
