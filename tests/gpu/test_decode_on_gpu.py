"""What only a GPU can show of decode by one launch and of parts by the lengths: streams, graphs, compiled variants."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.triton.attention import adapter as adapters
from kernelhub.backends.triton.attention.split_kv import merge_kernel, split_kernel
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_out
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.runtime import counters

pytestmark = pytest.mark.gpu

HEADS = AttentionModel("llama-like", 16, 4, 128, 128)
LONGEST = 4096
KERNEL = "triton.split_kv"  # of 20 sequences and more it makes so few parts that one launch merges them


@pytest.fixture(params=[False, True], ids=["host's parts", "shared"], autouse=True)
def balance(request, monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(adapters, "BALANCE", request.param)
    kernelhub.paged_attention.op._forget()
    yield
    monkeypatch.undo()
    kernelhub.paged_attention.op._forget()


def call_of(count: int, seed: int = 0, **inputs: Any) -> dict[str, Any]:
    """Sequences of the longest length; `redraw` gives them others."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return paged_attention_inputs(HEADS, seq_lens=(LONGEST,) * count, device="cuda", generator=generator, **inputs)


def redraw(arguments: dict[str, Any], draw: random.Random) -> None:
    """Other lengths, some of them 0, and other queries."""
    lengths = [draw.choice((0, 1, 200, draw.randrange(LONGEST), LONGEST)) for _ in arguments["seq_lens"]]
    arguments["seq_lens"].copy_(torch.tensor(lengths))
    arguments["q"].normal_()


def agrees(out: torch.Tensor, arguments: dict[str, Any]) -> None:
    agreement = compare_out(out, kernelhub.paged_attention.reference(**arguments), largest_value(arguments))
    assert agreement.ok, str(agreement)


def captured(call: Any, eager: int = 2) -> torch.cuda.CUDAGraph:
    for _ in range(eager):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def kernels_of(call: Any) -> list[str]:
    """Names of the kernels that a call runs."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if "split_kernel" in event.name or "merge_kernel" in event.name]


class TestNumbers:
    @pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
    @pytest.mark.parametrize("count", [1, 3, 40, 130, 300])
    def test_any_lengths_give_the_reference(self, count: int, kv_dtype: torch.dtype) -> None:
        draw = random.Random(count)
        inputs = {"kv_dtype": kv_dtype} if kv_dtype != torch.bfloat16 else {}
        arguments = call_of(count, **inputs)
        for _ in range(4):
            redraw(arguments, draw)
            agrees(kernelhub.paged_attention(**arguments, backend=KERNEL), arguments)

    def test_a_long_sequence_among_short_ones(self) -> None:
        arguments = paged_attention_inputs(HEADS, seq_lens=(100_000, *[30] * 15), device="cuda")
        agrees(kernelhub.paged_attention(**arguments, backend=KERNEL), arguments)

    def test_batches_of_other_sizes_compile_nothing(self) -> None:
        device, compiled = torch.cuda.current_device(), set()
        for count in (1, 2, 9, 40, 130, 300):
            kernelhub.paged_attention(**call_of(count), backend=KERNEL)
            compiled.add(tuple(len(kernel.device_caches[device][0]) for kernel in (split_kernel, merge_kernel)))
        assert len(compiled) == 1, "a batch of another size compiled a kernel"


class TestStreams:
    def test_calls_on_several_streams_at_once_keep_apart(self) -> None:
        draw = random.Random(0)
        streams = [torch.cuda.Stream() for _ in range(3)]
        calls = [call_of(count, seed) for seed, count in enumerate((20, 20, 37))]
        for arguments in calls:
            redraw(arguments, draw)
            kernelhub.paged_attention(**arguments, backend=KERNEL)
        torch.cuda.synchronize()
        outs: list[list[torch.Tensor]] = [[], [], []]
        for _ in range(100):
            for stream, arguments, kept in zip(streams, calls, outs, strict=True):
                with torch.cuda.stream(stream):
                    kept.append(kernelhub.paged_attention(**arguments, backend=KERNEL))
        torch.cuda.synchronize()
        for arguments, kept in zip(calls, outs, strict=True):
            agrees(kept[0], arguments)
            assert all(torch.equal(out, kept[0]) for out in kept)
        assert all(not one.any() for one in counters._kept.values())

    def test_an_eager_call_makes_one_launch(self) -> None:
        arguments = call_of(20)
        for _ in range(4):
            kernelhub.paged_attention(**arguments, backend=KERNEL)
        assert len(kernels_of(lambda: kernelhub.paged_attention(**arguments, backend=KERNEL))) == 1


class TestGraphs:
    def test_graphs_that_are_replayed_at_once_keep_apart(self) -> None:
        draw = random.Random(1)
        calls = [call_of(count, seed) for seed, count in enumerate((20, 20, 37))]
        outs = [torch.empty_like(arguments["q"]) for arguments in calls]
        graphs = [
            captured(lambda arguments=arguments, out=out: kernelhub.paged_attention(
                **arguments, out=out, backend=KERNEL))
            for arguments, out in zip(calls, outs, strict=True)
        ]  # fmt: skip
        streams = [torch.cuda.Stream() for _ in calls]
        for _ in range(20):
            for arguments, out in zip(calls, outs, strict=True):
                redraw(arguments, draw)
                out.fill_(torch.nan)
            torch.cuda.synchronize()
            for _ in range(10):
                for graph, stream in zip(graphs, streams, strict=True):
                    with torch.cuda.stream(stream):
                        graph.replay()
                kernelhub.paged_attention(**calls[0], backend=KERNEL)  # beside them
            torch.cuda.synchronize()
            for arguments, out in zip(calls, outs, strict=True):
                agrees(out, arguments)
        assert all(not one.any() for one in counters._kept.values())

    def test_a_captured_call_makes_one_launch(self) -> None:
        arguments = call_of(20)
        graph = captured(lambda: kernelhub.paged_attention(**arguments, backend=KERNEL))
        assert len(kernels_of(graph.replay)) == 1

    def test_a_capture_of_several_layers_on_two_streams(self) -> None:
        first, second = call_of(20), call_of(33, 1)
        side, outs = torch.cuda.Stream(), [torch.empty_like(one["q"]) for one in (first, second)]

        def layers() -> None:
            side.wait_stream(torch.cuda.current_stream())
            for _ in range(3):
                kernelhub.paged_attention(**first, out=outs[0], backend=KERNEL)
                with torch.cuda.stream(side):
                    kernelhub.paged_attention(**second, out=outs[1], backend=KERNEL)
            torch.cuda.current_stream().wait_stream(side)

        graph, draw = captured(layers), random.Random(2)
        for _ in range(5):
            for arguments, out in zip((first, second), outs, strict=True):
                redraw(arguments, draw)
                out.fill_(torch.nan)
            graph.replay()
            for arguments, out in zip((first, second), outs, strict=True):
                agrees(out, arguments)

    def test_a_capture_without_counters_merges_by_a_second_launch(self, monkeypatch) -> None:
        arguments = call_of(20)
        kernelhub.paged_attention(**arguments, backend=KERNEL)
        monkeypatch.setattr(counters, "capture_of", lambda stream: 0)
        out = torch.empty_like(arguments["q"])
        graph = captured(lambda: kernelhub.paged_attention(**arguments, out=out, backend=KERNEL))
        assert len(kernels_of(graph.replay)) == 2
        agrees(out, arguments)

    def test_graph_trees_of_torch_compile(self) -> None:
        """Their memory is that of other tensors between replays, and their warm-up runs in it."""
        calls = [call_of(count, seed) for seed, count in enumerate((20, 33))]

        @torch.compile(mode="reduce-overhead", fullgraph=True)
        def layers(first: dict[str, Any], second: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
            one = kernelhub.paged_attention(**first, backend=KERNEL) * 1
            two = kernelhub.paged_attention(**second, backend=KERNEL) * 1
            return one, kernelhub.paged_attention(**(second | {"q": two}), backend=KERNEL) * 1

        draw = random.Random(3)
        for _ in range(12):
            for arguments in calls:
                redraw(arguments, draw)
            torch.compiler.cudagraph_mark_step_begin()
            one, two = (out.clone() for out in layers(*calls))
            agrees(one, calls[0])
            middle = kernelhub.paged_attention(**calls[1], backend=KERNEL)
            agrees(two, calls[1] | {"q": middle})
            del one, two
            torch.randn(1 << 22, device="cuda")  # takes what the trees left
        assert all(not one.any() for one in counters._kept.values())
