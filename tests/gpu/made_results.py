"""Results that eager calls make for themselves, on a GPU: `python -m tests.gpu.made_results`.

In a process of its own, since nothing is made ready where a program has made a pool of memory, as the last check does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import kernelhub
from kernelhub.runtime import launch

CALLS = 60  # of each kind that are kept: several allocations of 16
LEARNING = 12


def kinds() -> dict[str, Callable[[], Any]]:
    """Calls without destinations, by Triton."""
    torch.manual_seed(0)
    x = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(512, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(4, 64, device="cuda")
    rows, products = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((2, 8, 128), (2, 64, 128)))
    sizes = torch.tensor([3, 8], device="cuda", dtype=torch.int32)
    by = {"backend": "triton"}
    return {
        "quantize_fp8, token": lambda: kernelhub.quantize_fp8(x, **by),
        "quantize_fp8, group": lambda: kernelhub.quantize_fp8(x, "group", **by),
        "quantize_mxfp8": lambda: kernelhub.quantize_mxfp8(x, **by),
        "quantize_nvfp4": lambda: kernelhub.quantize_nvfp4(x, **by),
        "rms_norm_quant": lambda: kernelhub.rms_norm_quant(x, weight, format="fp8_token", **by),
        "silu_and_mul_quant": lambda: kernelhub.silu_and_mul_quant(x, format="fp8_group", **by),
        "route_experts": lambda: kernelhub.route_experts(logits, 8, **by),
        "grouped_gemm": lambda: kernelhub.grouped_gemm(rows, products, group_sizes=sizes, **by)[:, :3],
    }


def parts(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(one for one in (result if isinstance(result, tuple) else (result,)) if one is not None)


def shared(result: Any) -> bool:
    return any(one.untyped_storage().nbytes() > one.nbytes for one in parts(result))


def same(got: Any, want: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(parts(got), want, strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))


def kept(name: str, call: Callable[[], Any], want: tuple[torch.Tensor, ...]) -> None:
    """Each of many results holds what the first call gave, whatever calls follow it."""
    made = [call() for _ in range(CALLS)]
    assert all(map(shared, made[20:])), f"{name}: not made ready"
    for one in made:
        same(one, want)


def late(call: Callable[[], Any], want: tuple[torch.Tensor, ...]) -> None:
    """What another stream reads late stays as it is once it was recorded and dropped."""
    side, sums = torch.cuda.Stream(), []
    for _ in range(CALLS):
        made = parts(call())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000)
            sums.append([one.contiguous().view(torch.uint8).clone() for one in made])
        for one in made:
            one.record_stream(side)
        del made
    torch.cuda.synchronize()
    for one in sums:
        same(tuple(one), tuple(part.view(torch.uint8) for part in want))


def streams(call: Callable[[], Any], want: tuple[torch.Tensor, ...]) -> None:
    """Calls on streams of their own, in turn."""
    others, made = [torch.cuda.Stream() for _ in range(3)], []
    for one in others:
        one.wait_stream(torch.cuda.current_stream())
    for at in range(CALLS):
        with torch.cuda.stream(others[at % 3]):
            made.append(call())
    torch.cuda.synchronize()
    for one in made:
        same(one, want)


def captured(call: Callable[[], Any], want: tuple[torch.Tensor, ...]) -> None:
    """A captured call writes memory of its graph, between calls that are not captured."""
    graph = torch.cuda.CUDAGraph()
    before = [call() for _ in range(3)]
    with torch.cuda.graph(graph):
        inside = call()
    after = [call() for _ in range(3)]
    own = {one.untyped_storage().data_ptr() for one in parts(inside)}
    assert not own & {one.untyped_storage().data_ptr() for made in (*before, *after) for one in parts(made)}
    for one in parts(inside):
        one.view(torch.uint8).zero_()
    for _ in range(3):
        graph.replay()
    for made in (*before, inside, *after):
        same(made, want)


def in_a_pool(calls: dict[str, Callable[[], Any]]) -> None:
    """In a block of `use_mem_pool` a result is memory of the pool, and afterwards none is."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        made = [call() for call in calls.values() for _ in range(LEARNING)]
    after = [call() for call in calls.values() for _ in range(LEARNING)]
    spans = [(one["address"], one["address"] + one["total_size"]) for one in pool.snapshot()]

    def inside(one: torch.Tensor) -> bool:
        return any(begin <= one.data_ptr() < end for begin, end in spans)

    assert all(inside(one) for result in made for one in parts(result))
    assert not any(inside(one) for result in after for one in parts(result))


def main() -> None:
    calls = kinds()
    native = launch.native()
    assert native is not None, launch.extension().reason
    if not launch._pools()[0]:
        print("torch has no counter of pools: nothing is made ready")
        return
    for name, call in calls.items():
        want = tuple(one.clone(memory_format=torch.contiguous_format) for one in parts(call()))
        for _ in range(LEARNING):
            call()
        for check in (late, streams, captured):
            check(call, want)
        kept(name, call, want)
        print(f"{name}: right", flush=True)
    in_a_pool(calls)
    print("in a pool: right")


if __name__ == "__main__":
    sys.exit(main())
