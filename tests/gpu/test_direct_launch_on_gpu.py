"""kernelhub's own launches give the bits of launches by Triton, on any stream, thread and in a graph."""

from __future__ import annotations

import ctypes
import importlib
import inspect
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import kernelhub
from kernelhub.backends.shared.launches import sequence
from kernelhub.backends.triton.launch import Launcher
from kernelhub.dispatch.hub import HUB
from kernelhub.ops import functions
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.runtime import launch

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn


def paged(
    lens: tuple[int, ...] = (1000, 37, 0, 512), tokens: int = 1, fp8: bool = False, **more: Any
) -> dict[str, Any]:
    torch.manual_seed(1)
    heads, kv_heads, width, size = 16, 4, 128, 16
    seqs, most = len(lens), -(-max(lens) // size)
    cache = torch.randn(2 + seqs * most, kv_heads, size, 2 * width, device="cuda", dtype=torch.bfloat16)
    k, v = (part.to(FP8) if fp8 else part for part in cache.transpose(1, 2).split(width, dim=-1))
    shape = (seqs, heads, width) if tokens == 1 else (seqs, tokens, heads, width)
    table = torch.randperm(seqs * most, device="cuda", dtype=torch.int64).to(torch.int32).view(seqs, most)
    return {
        "q": torch.randn(shape, device="cuda", dtype=torch.bfloat16),
        "k_cache": k,
        "v_cache": v,
        "block_table": table,
        "seq_lens": torch.tensor(lens, device="cuda", dtype=torch.int32),
        "backend": "triton.split_kv",
        **more,
    }


def ragged() -> dict[str, Any]:
    given = paged()
    starts = torch.tensor([0, 1, 4, 4, 6], device="cuda", dtype=torch.int32)
    q = torch.randn(6, 16, 128, device="cuda", dtype=torch.bfloat16)
    return given | {"q": q, "cu_seqlens_q": starts, "max_seqlen_q": 3}


FORMS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": paged,
    "one part": lambda: paged((40, 9)),
    "long": lambda: paged((20000,)),
    "several tokens": lambda: paged((1000, 37, 20, 512), 3),
    "ragged": ragged,
    "with its LSE": lambda: paged(return_lse=True),
    "features": lambda: paged(
        window=300, softcap=20.0, sinks=torch.randn(16, device="cuda", dtype=torch.bfloat16), scale=0.1
    ),
    "fp8, scales on the host": lambda: paged(fp8=True, k_scale=0.5, v_scale=2.0),
    "fp8, scales on the device": lambda: paged(
        fp8=True, k_scale=torch.tensor(0.5, device="cuda"), v_scale=torch.tensor(2.0, device="cuda")
    ),
}


_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the launches that the driver gets from the launcher."""
    library = launch.cuda()
    assert library is not None
    assert launch.native() is not None, launch.extension().reason
    counted = [0]

    @_LAUNCH
    def counting(*given: Any) -> int:
        counted[0] += 1
        return library.cuLaunchKernelEx(*map(ctypes.c_void_p, given))

    native = launch.native_of(
        launch.extension().module,
        *map(launch.address, (counting, library.cuTensorMapEncodeTiled, library.cuStreamIsCapturing)),
    )
    monkeypatch.setattr(launch, "native", lambda: native)
    monkeypatch.setattr(HUB, "known_of", HUB.known_of)  # put back
    launch.recognise_in_c(native)
    forget()
    yield counted
    forget()


def forget() -> None:
    """Make adapters anew, which keep what launches them."""
    for function in functions():
        function.op._forget()


def by_triton(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], op: Any = kernelhub.paged_attention) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(launch, "native", lambda: None)
        forget()
        result = op(**given)
    forget()
    return result


def same(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]:
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_the_bits_of_triton_s_launch(form, launches, monkeypatch) -> None:
    given = FORMS[form]()
    want = by_triton(monkeypatch, given)
    kernelhub.paged_attention(**given)
    before = launches[0]
    for shift in range(3):  # other tensors at other addresses
        other = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
        if shift:
            other["k_cache"], other["v_cache"] = given["k_cache"], given["v_cache"]
        same(kernelhub.paged_attention(**other), want)
    assert launches[0] > before


def test_an_operand_off_alignment_and_other_strides_are_right(launches, monkeypatch) -> None:
    given = paged()
    want = by_triton(monkeypatch, given)
    room = torch.empty(given["q"].numel() + 3, device="cuda", dtype=torch.bfloat16)
    off = room[3:].view(given["q"].shape).copy_(given["q"])
    wide = torch.empty(4, 32, 128, device="cuda", dtype=torch.bfloat16)[:, ::2].copy_(given["q"])
    for _ in range(3):
        for q in (given["q"], off, wide):
            same(kernelhub.paged_attention(**given | {"q": q}), want)
            out = torch.empty_like(room)[3:].view(given["q"].shape)
            same(kernelhub.paged_attention(**given | {"q": q, "out": out}).contiguous(), want)


def test_layers_of_a_step_find_its_last_call_whatever_their_scale(launches, monkeypatch) -> None:
    """Each with a scale of its own: a call is made with its own values, not with those of the layer before."""
    given = paged()
    want = {scale: by_triton(monkeypatch, {**given, "scale": scale}) for scale in (0.1, 0.2)}
    for scale in (0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.1, 0.2, 0.1, 0.1):
        same(kernelhub.paged_attention(**given, scale=scale), want[scale])


def test_a_graph_replays_with_what_its_tensors_hold_then(launches, monkeypatch) -> None:
    given = paged()
    kernelhub.paged_attention(**given)
    kernelhub.paged_attention(**given)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(given["q"])
    before = launches[0]
    with torch.cuda.graph(graph):
        kernelhub.paged_attention(**given, out=out)
    assert launches[0] > before
    for seed in range(5):
        torch.manual_seed(seed)
        given["q"].normal_()
        given["seq_lens"].random_(0, 900)
        graph.replay()
        same(out, by_triton(monkeypatch, given))


def test_a_launch_is_on_the_current_stream(launches, monkeypatch) -> None:
    given = paged()
    want = by_triton(monkeypatch, given)
    kernelhub.paged_attention(**given)
    source = given["q"].clone()
    given["q"].zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        given["q"].copy_(source)
        got = kernelhub.paged_attention(**given)
    side.synchronize()
    same(got, want)


def test_threads_share_a_kernel(launches, monkeypatch) -> None:
    """Also threads whose first use of the GPU this is."""
    cases = [(given, by_triton(monkeypatch, given)) for given in (paged(), paged((700, 701)), paged((40, 9)))]
    for given, _ in cases:
        kernelhub.paged_attention(**given)
    wrong: list[str] = []

    def work(given: dict[str, Any], want: torch.Tensor) -> None:
        for _ in range(300):
            if not torch.equal(kernelhub.paged_attention(**given), want):
                wrong.append("differs")

    threads = [threading.Thread(target=work, args=case) for case in cases * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_profiler_s_hooks_see_each_launch(launches) -> None:
    given = paged()
    kernelhub.paged_attention(**given)
    kernelhub.paged_attention(**given)
    before, seen = launches[0], []
    hook = triton.knobs.runtime.launch_enter_hook
    call = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    hook.add(call)
    try:
        kernelhub.paged_attention(**given)
    finally:
        hook.remove(call)
    assert seen
    assert launches[0] == before


# Sizes of the examples of other ops, small enough that a call is repeated.
EXAMPLES: dict[str, dict[str, Any]] = {
    "attention": {"q_tokens": 8},
    "merge_attention_states": {"tokens": 8},
    "mla_attention": {"seq_lens": (300, 7)},
    "write_kv_cache": {"tokens": 8},
    "write_mla_cache": {"tokens": 8},
    "concat_mla_k": {"tokens": 8},
    "quantize_fp8": {"tokens": 4, "width": 512},
    "quantize_nvfp4": {"tokens": 4, "width": 512},
    "rms_norm_quant": {"tokens": 4, "width": 512},
    "silu_and_mul_quant": {"tokens": 4, "width": 512},
    "fp4_gemm": {"tokens": 4, "n": 256, "k": 256},
    "fp8_gemm": {"tokens": 4, "n": 256, "k": 2048},
    "grouped_gemm": {"n": 64, "k": 128},
    "fused_moe": {
        "num_experts": 4,
        "hidden_size": 256,
        "intermediate_size": 128,
        "top_k": 2,
        "weights": "fp8_block",
    },
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_op_s_repeated_calls_have_the_bits_of_triton_s(name, launches, monkeypatch) -> None:
    """With other tensors each time, and NaN in the memory that their temporaries get."""
    op = getattr(kernelhub, name)
    module, _, example = op.op.contract.example.partition(":")
    torch.manual_seed(2)
    given = getattr(importlib.import_module(module), example)(**EXAMPLES[name], device="cuda")
    given = {**given, "backend": "triton"}
    if name == "grouped_gemm":  # rows of no group keep what `out` holds
        given["out"] = torch.zeros_like(op(**given))
    want = by_triton(monkeypatch, given, op)
    kept = []
    for _ in range(12):
        other = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in given.items()}
        kept.append(other)
        for size in (1 << 10, 1 << 16, 1 << 20):
            torch.full((size,), float("nan"), device="cuda", dtype=torch.float32)
        before = launches[0]
        got = op(**other)
        same(got, want)
    assert launches[0] > before
    if name != "mla_attention":
        bound = inspect.signature(op).bind(**other)
        bound.apply_defaults()
        got = op.op.again(*(bound.arguments[parameter] for parameter in op.op.parameters))
        assert got is not None, "the extension makes the whole call"
        same(got, want)
        plan = op.prepare(**given)
        taken = inspect.signature(plan.run).parameters.keys() - set(plan.weights)
        for _ in range(12):
            runs = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in given.items()}
            kept.append(runs)
            same(plan.run(**{key: runs[key] for key in taken & runs.keys()}), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = op(**other)
    for _ in range(3):
        graph.replay()
        same(got, want)


def latent(heads: int = 16, tokens: int = 1, **more: Any) -> dict[str, Any]:
    torch.manual_seed(2)
    lens = (1000, 37, 0, 512)
    shape = (4, heads, 576) if tokens == 1 else (4, tokens, heads, 576)
    return {
        "q": torch.randn(shape, device="cuda", dtype=torch.bfloat16),
        "kv_cache": torch.randn(70, 64, 576, device="cuda", dtype=torch.bfloat16),
        "block_table": torch.randperm(64, device="cuda", dtype=torch.int64).to(torch.int32).view(4, 16),
        "seq_lens": torch.tensor(lens, device="cuda", dtype=torch.int32),
        "scale": 0.1,
        "value_dim": 512,
        "backend": "gluon.decode",
        **more,
    }


def with_backend(kernel: str, given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "backend": kernel}


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


# Kernels whose operands are tensor maps: the op and a call.
MAPPED: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "latent decode": lambda: (kernelhub.mla_attention, latent()),
    "latent decode, several tokens and its LSE": lambda: (
        kernelhub.mla_attention,
        latent(128, 2, return_lse=True),
    ),
    "fp8 product in blocks": lambda: (
        kernelhub.fp8_gemm,
        with_backend("gluon.fp8_gemm", fp8_gemm_inputs(tokens=300, n=1024, k=2048, device="cuda")),
    ),
    "fp8 product by tensor": lambda: (
        kernelhub.fp8_gemm,
        with_backend(
            "gluon.fp8_gemm", fp8_gemm_inputs(tokens=300, n=1024, k=2048, scaling="tensor", bias=True, device="cuda")
        ),
    ),
    "prefill": lambda: (
        kernelhub.attention,
        {
            "q": bfloat16(2, 300, 8, 128),
            "k": bfloat16(2, 300, 2, 128),
            "v": bfloat16(2, 300, 2, 128),
            "causal": True,
            "backend": "gluon.prefill_pipelined",
        },
    ),
    "experts": lambda: (
        kernelhub.fused_moe,
        with_backend(
            "gluon.experts",
            moe_inputs(
                "qwen3-30b-a3b", tokens=300, weights="fp8_block", num_experts=16, hidden_size=1024, device="cuda"
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", MAPPED)
def test_maps_of_other_tensors_give_the_bits_of_triton_s_launch(name, launches, monkeypatch) -> None:
    op, given = MAPPED[name]()
    want = by_triton(monkeypatch, given, op)
    for _ in range(3):
        same(op(**given), want)
    kept = []  # so that each has memory of its own
    for shift in range(4):
        other = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in given.items()}
        kept.append(other)
        before = launches[0]
        same(op(**(other if shift % 2 else given)), want)
        assert launches[0] > before


def test_a_graph_of_mapped_kernels_replays_with_what_its_tensors_hold_then(launches, monkeypatch) -> None:
    given = latent()
    for _ in range(4):
        kernelhub.mla_attention(**given)
    graph, out = torch.cuda.CUDAGraph(), torch.empty(4, 16, 512, device="cuda", dtype=torch.bfloat16)
    before = launches[0]
    with torch.cuda.graph(graph):
        kernelhub.mla_attention(**given, out=out)
    assert launches[0] > before
    for seed in range(5):
        torch.manual_seed(seed)
        given["q"].normal_()
        given["seq_lens"].random_(0, 900)
        graph.replay()
        same(out, by_triton(monkeypatch, given, kernelhub.mla_attention))


def test_layers_with_caches_of_their_own_repeat_a_latent_call(launches, monkeypatch) -> None:
    layers = [latent() for _ in range(3)]
    for given in layers[1:]:
        given["kv_cache"].normal_()
        given["block_table"], given["seq_lens"] = layers[0]["block_table"], layers[0]["seq_lens"]
    want = [by_triton(monkeypatch, given, kernelhub.mla_attention) for given in layers]
    for _ in range(6):
        for given, result in zip(layers, want, strict=True):
            same(kernelhub.mla_attention(**given), result)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for given, result in zip(layers, want, strict=True):
            same(kernelhub.mla_attention(**given), result)
    side.synchronize()


@triton.jit
def twice(x, y, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at, mask=at < n, other=0) * 2, mask=at < n)


@pytest.fixture
def as_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], dict[str, int]]]:
    """Sequences become graphs at their second launch; gives the counts."""
    library = launch.cuda()
    assert library is not None
    graphs = launch.as_graphs(library, after=1, least=1)
    assert graphs, "the driver has all functions"
    functions = (library.cuLaunchKernelEx, library.cuTensorMapEncodeTiled, library.cuStreamIsCapturing)
    native = launch.native_of(launch.extension().module, *map(launch.address, functions), **graphs)
    monkeypatch.setattr(launch, "native", lambda: native)
    monkeypatch.setattr(HUB, "known_of", HUB.known_of)  # put back
    launch.recognise_in_c(native)
    forget()
    yield launch.graph_counts
    assert launch.graph_counts()["refused"] == 0, launch.graph_counts()
    forget()


def four_times(**options: Any) -> Any:
    """A sequence of two launches: the second operand is twice the first, the third twice the second."""
    size, x = 4096, torch.zeros(4096, device="cuda")
    launcher = Launcher(twice, {"SIZE": 256}, 4, **options)
    launcher(16, (0,), x, x, size)
    step = launcher.step(16, (0,), x, x, size)
    assert step is not None
    return sequence([step, step], [[(0, 0), (1, 0), None], [(1, 0), (2, 0), None]], 3, [0, 1, 2])


@pytest.mark.parametrize("options", [{}, {"num_ctas": 2}, {"launch_cooperative_grid": True}], ids=str)
def test_a_graph_has_the_operands_of_each_call(options, as_graphs) -> None:
    """Thousands of calls in flight on two streams, of which one has a priority, between launches of torch."""
    made = four_times(**options)
    streams = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    operands = {stream: [torch.zeros(3, 4096, device="cuda") for _ in range(8)] for stream in streams}
    torch.cuda.synchronize()
    choose = random.Random(1)
    for batch in range(40):
        wanted: dict[Any, list[Any]] = {stream: [] for stream in streams}
        for call in range(100):
            stream = choose.choice(streams)
            with torch.cuda.stream(stream):
                x, between, y = choose.choice(operands[stream])
                x.fill_(call + batch)
                assert made.launch(x, between, y) is True
                wanted[stream].append((y.clone(), 4.0 * (call + batch)))
                between.fill_(-1)
        torch.cuda.synchronize()
        for of_stream in wanted.values():
            for got, value in of_stream:
                assert bool((got == value).all())
        if batch % 10 == 0:
            torch.cuda.empty_cache()
    counts = as_graphs()
    assert counts["made"] == counts["live"] == 2
    assert counts["launches"] >= 3998
    del made
    assert as_graphs()["live"] == 0


def test_a_graph_in_flight_may_be_freed_or_give_way(as_graphs) -> None:
    made, results = four_times(), []
    for _ in range(3):
        for stream in [torch.cuda.Stream() for _ in range(6)]:
            with torch.cuda.stream(stream):
                operands = torch.ones(3, 4096, device="cuda")
                torch.cuda._sleep(1_000_000)
                for _ in range(300):
                    assert made.launch(*operands) is True
                results.append(operands[2])
    del made
    torch.cuda.synchronize()
    assert all(bool((result == 4).all()) for result in results)
    assert as_graphs()["evicted"] > 0
    assert as_graphs()["live"] == 0


def test_captured_calls_are_plain_and_replay(as_graphs) -> None:
    made, operands = four_times(), torch.ones(3, 4096, device="cuda")
    for _ in range(4):
        made.launch(*operands)
    before, graph = as_graphs()["launches"], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.launch(*operands)
    assert as_graphs()["launches"] == before
    for value in range(5):
        operands[0].fill_(value)
        graph.replay()
        assert bool((operands[2] == 4 * value).all())
        made.launch(*operands)
    assert as_graphs()["launches"] == before + 5


def test_graphs_are_made_and_changed_while_another_thread_captures(as_graphs) -> None:
    first, second = four_times(), four_times()
    captured, graph = torch.ones(3, 4096, device="cuda"), torch.cuda.CUDAGraph()
    operands = torch.ones(2, 3, 4096, device="cuda")
    stream, capturing, launched = torch.cuda.Stream(), threading.Event(), threading.Event()
    first.launch(*operands[0])
    torch.cuda.synchronize()

    def work() -> None:
        torch.cuda.set_device(0)
        capturing.wait()
        with torch.cuda.stream(stream):
            for call in range(100):
                first.launch(*operands[call % 2])
        launched.set()

    thread = threading.Thread(target=work)
    thread.start()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        capturing.set()
        assert launched.wait(60)
        second.launch(*captured)
    thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert bool((captured[2] == 4).all())
    assert bool((operands[:, 2] == 4).all())
    assert as_graphs()["made"] == 1


def test_threads_share_a_sequence(as_graphs) -> None:
    made, wrong = four_times(), []

    def work(value: float) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            operands = torch.full((3, 4096), value, device="cuda")
            for _ in range(1000):
                made.launch(*operands)
                if not bool((operands[2] == 4 * value).all()):
                    wrong.append(value)

    threads = [threading.Thread(target=work, args=(float(value),)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_child_leaves_the_graphs_of_its_parent_alone(as_graphs) -> None:
    made, operands = four_times(), torch.ones(3, 4096, device="cuda")
    for _ in range(4):
        made.launch(*operands)
    child = os.fork()
    if child == 0:
        del made
        os._exit(0)
    until = time.monotonic() + 30
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            pytest.fail("the child hangs")
    operands[0].fill_(3)
    assert made.launch(*operands) is True
    assert bool((operands[2] == 12).all())


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_op_s_calls_as_graphs_have_the_bits_of_triton_s(name, as_graphs, monkeypatch) -> None:
    """Hundreds of calls in flight, on two streams, with NaN in the memory that their temporaries get."""
    op = getattr(kernelhub, name)
    module, _, example = op.op.contract.example.partition(":")
    torch.manual_seed(2)
    given = getattr(importlib.import_module(module), example)(**EXAMPLES[name], device="cuda")
    given = {**given, "backend": "triton"}
    if name == "grouped_gemm":
        given["out"] = torch.zeros_like(op(**given))
    want = by_triton(monkeypatch, given, op)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    others = {
        stream: [
            {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in given.items()}
            for _ in range(3)
        ]
        for stream in streams
    }
    torch.cuda.synchronize()
    for batch in range(10):
        results = []
        for call in range(40):
            stream = streams[(call // 3) % 2]
            with torch.cuda.stream(stream):
                torch.full((1 << (10 + call % 10),), float("nan"), device="cuda", dtype=torch.float32)
                got = op(**others[stream][call % 3])
                results.append(tuple(one.clone() for one in got) if isinstance(got, tuple) else got.clone())
        torch.cuda.synchronize()
        for got in results:
            same(got, want)
        if batch == 5:
            torch.cuda.empty_cache()
    assert as_graphs()["launches"] > 100


@pytest.mark.parametrize("name", MAPPED)
def test_maps_of_other_tensors_are_given_to_nodes(name, as_graphs, monkeypatch) -> None:
    op, given = MAPPED[name]()
    want = by_triton(monkeypatch, given, op)
    for _ in range(4):
        same(op(**given), want)
    kept = []
    for _ in range(6):
        other = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in given.items()}
        kept.append(other)
        same(op(**other), want)
        same(op(**given), want)
