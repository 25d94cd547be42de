"""Calls of an engine's layers, which the extension makes at once: the bits of the op's own calls, whatever changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.attention.paged_attention import paged_attention, repeats_of
from kernelhub.ops.kv_cache.op import write_kv_cache, writes_like
from kernelhub.ops.layer_calls import LayerCalls
from kernelhub.ops.mla.attention.op import mla_attention
from kernelhub.ops.mla.attention.op import repeats_of as mla_repeats_of

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, WIDTH, PAGE, PAGES = 32, 8, 128, 16, 40
KERNEL = "triton.split_kv"


class Layer:
    """One layer with a cache of its own, as an engine runs it."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.cache = torch.randn(PAGES, PAGE, KV_HEADS, 2 * WIDTH, device="cuda", dtype=torch.bfloat16)
        self.tensors = self.cache.split(WIDTH, dim=-1)
        self.calls = LayerCalls.of(paged_attention.op, ("test", HEADS, WIDTH))
        self.launch = self.calls.layer(self.cache, self.tensors)

    def __call__(self, q: Any, out: Any, table: Any, lens: Any) -> bool:
        """Attend; whether the extension did it."""
        form = (q.shape[0],)
        if self.launch(q, out, self.cache, form, table, lens):
            return True
        k, v = self.tensors
        paged_attention(q, k, v, table, lens, scale=0.1, out=out)
        self.launch = self.calls.layer(self.cache, self.tensors)
        if self.calls.is_due(form):
            repeats = repeats_of(q, True, None, None, None, 0.1, None, None)
            self.calls.learn(form, repeats, (q, out), (k, v), (table, lens), (q, k, v, out, table, lens), (out,))
        return False

    def reference(self, q: Any, table: Any, lens: Any) -> Any:
        k, v = self.tensors
        with kernelhub.use(paged_attention=KERNEL):  # inside of which no call is repeated from its arguments
            return paged_attention(q, k, v, table, lens, scale=0.1)


def step_of(sequences: int) -> tuple[Any, Any]:
    table = torch.randperm(PAGES, device="cuda")[: sequences * (PAGES // sequences)].to(torch.int32)
    lens = torch.randint(1, PAGE * (PAGES // sequences), (sequences,), device="cuda", dtype=torch.int32)
    return table.view(sequences, -1), lens


def queries(sequences: int) -> Any:
    """A view of a wider tensor, as engines split what they project."""
    wide = torch.randn(sequences, (HEADS + 2 * KV_HEADS) * WIDTH, device="cuda", dtype=torch.bfloat16)
    return wide[:, : HEADS * WIDTH].view(sequences, HEADS, WIDTH)


def destination(sequences: int = 4) -> Any:
    return torch.full((sequences, HEADS, WIDTH), float("nan"), device="cuda", dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def one_kernel():
    kernelhub.configure(paged_attention=KERNEL)
    yield
    kernelhub.configure()


@pytest.fixture
def layers() -> list[Layer]:
    made = [Layer(seed) for seed in range(6)]
    for sequences in (4, 2, 4, 2):
        step = step_of(sequences)
        for layer in made:
            layer(queries(sequences), destination(sequences), *step)
    return made


def check(layer: Layer, sequences: int, step: Any, q: Any = None) -> bool:
    q = queries(sequences) if q is None else q
    out = destination(sequences)
    made = layer(q, out, *step)
    assert torch.equal(out, layer.reference(q, *step))
    return made


def test_layers_in_turn_steps_and_batches(layers) -> None:
    for at in range(40):
        sequences = (4, 4, 2)[at % 3]
        step = step_of(sequences)
        assert all(check(layer, sequences, step) for layer in layers), at


def test_other_streams(layers) -> None:
    step = step_of(4)
    torch.cuda.synchronize()
    for stream in (torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)):
        with torch.cuda.stream(stream):
            for layer in layers * 5:
                check(layer, 4, step)
        stream.synchronize()
    assert check(layers[0], 4, step)


def test_in_a_graph(layers) -> None:
    step, q = step_of(4), queries(4)
    outs = [destination() for _ in layers]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer, out in zip(layers, outs, strict=True):
            layer(q, out, *step)
    for _ in range(3):
        q.normal_()
        step[1].random_(1, PAGE * 10)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for layer, out in zip(layers, outs, strict=True):
            assert torch.equal(out, layer.reference(q, *step))
    assert check(layers[0], 4, step_of(4))


def test_what_differs_is_noticed(layers) -> None:
    step = step_of(4)
    assert check(layers[0], 4, step)
    packed = torch.randn(4, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    check(layers[0], 4, step, packed)
    check(layers[0], 4, step, packed.transpose(1, 2).contiguous().transpose(1, 2))
    q = queries(4)
    memory = torch.randn(5, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match="out"):
        layers[0](memory[:4], memory[1:], *step)
    with pytest.raises(InvalidArgument):
        layers[0](q, layers[0].cache.flatten()[: q.numel()].view(q.shape), *step)
    for wrong in (q.half(), q[:, :16], q[:3]):
        with pytest.raises((InvalidArgument, kernelhub.errors.NoKernel)):
            layers[0](wrong, torch.empty_like(packed), *step)
    for _ in range(2):
        check(layers[0], 4, step)


def test_settings_and_counts(layers) -> None:
    step = step_of(4)
    before = sum(row.calls for row in kernelhub.report().rows)
    assert all(layer(queries(4), destination(), *step) for layer in layers)
    assert sum(row.calls for row in kernelhub.report().rows) == before + len(layers)
    with kernelhub.use(paged_attention="torch"):
        assert not layers[0](queries(4), destination(), *step)
    kernelhub.configure(paged_attention="torch")
    assert not layers[0](queries(4), destination(), *step)


@pytest.mark.parametrize("kernel", ["triton", "gluon"])
def test_latent_layers(kernel) -> None:
    kernelhub.configure(mla_attention=kernel)
    caches = [torch.randn(PAGES, 64, 576, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    calls = LayerCalls.of(mla_attention.op, "test")
    launches, quick = [calls.layer(cache, (cache,)) for cache in caches], 0
    for at in range(30):
        sequences = (4, 4, 2)[at % 3]
        table, lens = step_of(sequences)
        lens *= 64 // PAGE
        for layer, cache in enumerate(caches):
            q = torch.randn(sequences, 16, 576, device="cuda", dtype=torch.bfloat16)
            out = torch.full((sequences, 16, 512), float("nan"), device="cuda", dtype=torch.bfloat16)
            if launches[layer](q, out, cache, sequences, table, lens):
                quick += 1
            else:
                mla_attention(q, cache, table, lens, scale=0.1, out=out)
                launches[layer] = calls.layer(cache, (cache,))
                if calls.is_due(sequences):
                    operands = q, cache, out, table, lens
                    repeats = mla_repeats_of(0.1, 512)
                    calls.learn(sequences, repeats, (q, out), (cache,), (table, lens), operands, (out,))
            with kernelhub.use(mla_attention=kernel):
                want = mla_attention(q, cache, table, lens, scale=0.1)
            assert torch.equal(out, want), (at, layer)
    assert quick > 60


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("kernel", ["cuda.write", "triton.write"])
def test_written_layers(kernel, kv_dtype) -> None:
    """Writes of layers in turn, with padding and rows past it, and in a graph: the bytes of the op's own calls."""
    if kernel.startswith("cuda"):
        pytest.importorskip("cuda.bindings")
    kernelhub.configure(write_kv_cache=kernel)
    quantised = kv_dtype is not torch.bfloat16
    scales = tuple(torch.full((1,), one, device="cuda") for one in (0.5, 0.25)) if quantised else ()
    caches = [torch.zeros(PAGES, PAGE, KV_HEADS, 2 * WIDTH, device="cuda").to(kv_dtype) for _ in range(4)]
    halves = [cache.split(WIDTH, dim=-1) for cache in caches]
    calls = LayerCalls.of(write_kv_cache.op, ("test", kernel, quantised))
    launches = [calls.layer(cache, (*parts, *scales)) for cache, parts in zip(caches, halves, strict=True)]
    quick = 0

    def write(layer: int, k: Any, v: Any, slots: Any) -> bool:
        if launches[layer](k, v, caches[layer], len(slots), slots):
            return True
        rows = k[: len(slots)], v[: len(slots)]
        write_kv_cache(*rows, *halves[layer], slots, *scales)
        launches[layer] = calls.layer(caches[layer], (*halves[layer], *scales))
        if calls.is_due(len(slots)):
            repeats = writes_like(*rows, *halves[layer], *(scales or (None, None)))
            operands = (*rows, *halves[layer], slots, *scales)
            calls.learn(len(slots), repeats, (k, v), (*halves[layer], *scales), (slots,), operands, halves[layer])
        return False

    def keys(rows: int) -> tuple[Any, Any]:
        wide = torch.randn(rows, (HEADS + 2 * KV_HEADS) * WIDTH, device="cuda", dtype=torch.bfloat16)
        _, k, v = wide.split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], dim=1)
        return k.view(rows, KV_HEADS, WIDTH), v.view(rows, KV_HEADS, WIDTH)

    def check(layer: int, k: Any, v: Any, slots: Any, done: Any) -> None:
        want = torch.zeros_like(caches[layer], dtype=torch.float32).to(kv_dtype)
        with kernelhub.use(write_kv_cache=kernel):  # inside of which no call is repeated from its arguments
            write_kv_cache(k[: len(slots)], v[: len(slots)], *want.split(WIDTH, dim=-1), slots, *scales)
        assert torch.equal(done.view(torch.uint8), want.view(torch.uint8))
        assert bool((want.view(torch.uint8) != 0).any())

    for at in range(30):
        tokens, rows = ((4, 4), (6, 8), (1, 1))[at % 3]
        slots = torch.randperm(PAGES * PAGE, device="cuda")[:tokens]
        slots[5:] = -1
        for layer, cache in enumerate(caches):
            cache.view(torch.uint8).zero_()
            k, v = keys(rows)
            quick += write(layer, k, v, slots)
            check(layer, k, v, slots, cache)
    assert quick > 80
    slots, given = torch.randperm(PAGES * PAGE, device="cuda")[:4], [keys(4) for _ in caches]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert all(write(layer, *given[layer], slots) for layer in range(len(caches)))
    for _ in range(2):
        slots.copy_(torch.randperm(PAGES * PAGE, device="cuda")[:4])
        for (k, v), cache in zip(given, caches, strict=True):
            k.normal_()
            v.normal_()
            cache.view(torch.uint8).zero_()
        graph.replay()
        for layer, cache in enumerate(caches):
            check(layer, *given[layer], slots, cache)
