"""Calls of an engine's layers, which the extension makes at once: the bits of the op's own calls, whatever changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.attention.paged_attention import paged_attention, repeats_of
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
            self.calls.learn(form, repeats, (q, out), (k, v), (table, lens), (q, k, v, out, table, lens))
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
                    calls.learn(sequences, mla_repeats_of(0.1, 512), (q, out), (cache,), (table, lens), operands)
            with kernelhub.use(mla_attention=kernel):
                want = mla_attention(q, cache, table, lens, scale=0.1)
            assert torch.equal(out, want), (at, layer)
    assert quick > 60
