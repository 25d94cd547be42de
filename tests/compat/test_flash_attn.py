"""flash-attn's functions by kernelhub: parameters, results, and an engine of nano-vllm's form that calls them."""

from __future__ import annotations

import importlib.util
import inspect
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

import kernelhub
from kernelhub.compat import flash_attn
from kernelhub.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from kernelhub.errors import InvalidArgument
from tests.runtime.world import run_world

_BENCHMARK = importlib.util.spec_from_file_location(
    "nano_vllm_benchmark", Path(__file__).parents[2] / "benchmarks" / "nano_vllm.py"
)
nano_vllm = importlib.util.module_from_spec(_BENCHMARK)
_BENCHMARK.loader.exec_module(nano_vllm)

# Of flash-attn 2.8.3.
_COMMON = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
_CACHED = dict.fromkeys(
    ("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table")
)
_LENGTHS = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), inspect.Parameter.empty)
_OPERANDS = dict.fromkeys("qkv", inspect.Parameter.empty)
PARAMETERS: dict[str, dict[str, Any]] = {
    "flash_attn_func": _OPERANDS | _COMMON,
    "flash_attn_varlen_func": _OPERANDS | _LENGTHS | _COMMON | {"block_table": None},
    "flash_attn_with_kvcache": {
        **dict.fromkeys(("q", "k_cache", "v_cache"), inspect.Parameter.empty),
        **_CACHED,
        **{name: _COMMON[name] for name in ("softmax_scale", "causal", "window_size", "softcap")},
        "rotary_interleaved": True,
        "alibi_slopes": None,
        "num_splits": 0,
        "return_softmax_lse": False,
    },
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_flash_attn_s(name) -> None:
    ours = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(ours) == list(PARAMETERS[name])
    assert {key: item.default for key, item in ours.items()} == PARAMETERS[name]
    if importlib.util.find_spec("flash_attn") is not None:
        theirs = inspect.signature(getattr(importlib.import_module("flash_attn"), name)).parameters
        assert list(theirs) == list(ours)


def expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence ``[S, H, D]`` as flash-attn's documentation describes it, in float64; and the LSE ``[H, S]``."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.double().repeat_interleave(group, dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * (softmax_scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    key = torch.arange(k.shape[0])
    left, right = window_size
    hidden = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    if causal or right >= 0:
        hidden |= key > at + (0 if causal else right)
    if left >= 0:
        hidden |= key < at - left
    scores.masked_fill_(hidden, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), v), scores.logsumexp(-1)


FEATURES = [
    {},
    {"causal": True},
    {"window_size": (5, 2)},
    {"window_size": (7, -1), "causal": True},
    {"softcap": 2.0, "softmax_scale": 0.3},
]


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_batches_of_equal_lengths(features) -> None:
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 9, 4, 32), torch.randn(2, 2, 14, 2, 32)
    out, lse, probabilities = flash_attn_func(q, k, v, 0.0, return_attn_probs=True, **features)
    assert probabilities is None
    for i in range(2):
        want, sums = expected(q[i], k[i], v[i], **features)
        close(out[i], want)
        close(lse[i], sums)
    assert torch.equal(flash_attn_func(q, k, v, **features), out)


def pages_of(parts: list[Tensor], size: int = 16, columns: int = 4) -> tuple[Tensor, Tensor]:
    """Sequences ``[S, KH, D]`` in pages of a poisoned cache, and their table, -1 past their last page."""
    cache = torch.full((len(parts) * columns + 1, size, *parts[0].shape[1:]), float("nan"))
    table = torch.full((len(parts), columns), -1, dtype=torch.int32)
    free = torch.randperm(cache.shape[0], generator=torch.Generator().manual_seed(3)).tolist()
    for row, part in enumerate(parts):
        for column, tokens in enumerate(part.split(size)):
            table[row, column] = page = free.pop()
            cache[page, : len(tokens)] = tokens
    return cache, table


@pytest.mark.parametrize("paged", [False, True], ids=["packed", "pages"])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_sequences_of_different_lengths(features, paged) -> None:
    torch.manual_seed(0)
    q_lens, k_lens = (3, 1, 20), (3, 40, 29)
    q = torch.randn(sum(q_lens), 4, 32)
    k, v = torch.randn(2, sum(k_lens), 2, 32)
    starts, ends = (torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32) for lens in (q_lens, k_lens))
    given: list[Any] = [k, v]
    table = None
    if paged:
        (k_cache, table), (v_cache, _) = (pages_of(list(part.split(k_lens))) for part in (k, v))
        given = [k_cache, v_cache]
    more = features | {"return_attn_probs": True, "block_table": table}
    out, lse, _ = flash_attn_varlen_func(q, *given, starts, ends, max(q_lens), max(k_lens), **more)
    for i, (some, keys, values) in enumerate(zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True)):
        want, sums = expected(some, keys, values, **features)
        close(out[starts[i] : starts[i + 1]], want)
        close(lse[:, starts[i] : starts[i + 1]], sums)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_decode_over_a_cache(features, tokens) -> None:
    torch.manual_seed(0)
    lens = (17, 5, 33)
    parts = [torch.randn(2, length, 2, 32) for length in lens]
    q = torch.randn(3, tokens, 4, 32)
    (k_cache, table), (v_cache, _) = (pages_of([part[i] for part in parts]) for i in range(2))
    seqlens = torch.tensor(lens, dtype=torch.int32)
    given = features | {"cache_seqlens": seqlens, "return_softmax_lse": True}
    paged = flash_attn_with_kvcache(q, k_cache, v_cache, block_table=table, **given)
    rows = torch.full((5, 64, 2, 32), float("nan")), torch.full((5, 64, 2, 32), float("nan"))
    order = torch.tensor([4, 0, 2], dtype=torch.int32)
    for row, part in zip(order.tolist(), parts, strict=True):
        for cache, tensor in zip(rows, part, strict=True):
            cache[row, : tensor.shape[0]] = tensor
    plain = flash_attn_with_kvcache(q, *rows, cache_batch_idx=order, **given)
    for out, lse in (paged, plain):
        assert (out.shape, lse.shape) == (q.shape, (3, 4, tokens))
        for i, (keys, values) in enumerate(parts):
            want, sums = expected(q[i], keys, values, **features)
            close(out[i], want)
            close(lse[i], sums)


@pytest.mark.parametrize("pages", [False, True])
def test_new_tokens_are_written_first(pages) -> None:
    torch.manual_seed(0)
    lens = (15, 0, 31)  # the first one's new tokens are in two pages
    old = [torch.randn(2, length, 2, 32) for length in lens]
    new = torch.randn(2, 3, 2, 2, 32)
    q = torch.randn(3, 2, 4, 32)
    if pages:
        room = [torch.cat([part, torch.zeros(2, 2, 2, 32)], dim=1) for part in old]
        (k_cache, table), (v_cache, _) = (pages_of([part[i] for part in room]) for i in range(2))
    else:
        k_cache, v_cache = torch.full((2, 3, 40, 2, 32), float("nan"))
        table = None
        for i, part in enumerate(old):
            k_cache[i, : lens[i]], v_cache[i, : lens[i]] = part
    seqlens = torch.tensor(lens, dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, *new, cache_seqlens=seqlens, block_table=table, causal=True)
    assert seqlens.tolist() == list(lens)
    for i, part in enumerate(old):
        keys, values = (torch.cat([part[n], new[n, i]]) for n in range(2))
        close(out[i], expected(q[i], keys, values, causal=True)[0])


def split(joined: Tensor) -> tuple[Tensor, Tensor]:
    return joined[:, 0], joined[:, 1]


def halves(joined: Tensor) -> tuple[Tensor, Tensor]:
    return joined[..., :32], joined[..., 32:]


@pytest.mark.parametrize(
    ("shape", "views"), [((2, 2, 40, 2, 32), split), ((2, 40, 2, 64), halves)], ids=["axis", "row"]
)
def test_new_tokens_are_written_into_caches_that_are_views(shape, views) -> None:
    torch.manual_seed(0)
    joined = torch.full(shape, float("nan"))
    k_cache, v_cache = views(joined)
    old, new = torch.randn(2, 2, 7, 2, 32), torch.randn(2, 2, 3, 2, 32)
    k_cache[:, :7], v_cache[:, :7] = old
    q = torch.randn(2, 3, 4, 32)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, *new, cache_seqlens=7, causal=True)
    for i in range(2):
        keys, values = (torch.cat([old[n, i], new[n, i]]) for n in range(2))
        close(out[i], expected(q[i], keys, values, causal=True)[0])
    assert torch.equal(k_cache[:, 7:10], new[0])
    assert torch.equal(v_cache[:, 7:10], new[1])
    assert bool(joined.isnan().any())


NOW = torch.ones(2, 1, 2, 32)
INDEX = torch.tensor


@pytest.mark.parametrize(
    ("given", "parameter", "part"),
    [
        ({"k": NOW, "v": NOW}, "cache_seqlens", "is missing with k"),
        ({"k": NOW, "v": NOW, "cache_seqlens": 24}, "cache_seqlens", "is 24 for sequence 0, before.*give 0 to 23"),
        ({"k": NOW, "v": NOW, "cache_seqlens": -1}, "cache_seqlens", "-1 for sequence 0"),
        ({"k": NOW[:, :, :1], "v": NOW[:, :, :1], "cache_seqlens": 3}, "k", r"\[2, 1, 1, 32\]; give \[2, 1, 2, 32\]"),
        ({"k": NOW[:1], "v": NOW[:1], "cache_seqlens": 3}, "k", r"\[1, 1, 2, 32\]; give \[2, 1, 2, 32\]"),
        ({"k": NOW.repeat(1, 3, 1, 1), "v": NOW, "cache_seqlens": 3}, "v", r"give \[2, 3, 2, 32\]"),
        ({"k": NOW.half(), "v": NOW.half(), "cache_seqlens": 3}, "k", "float16; k_cache has float32"),
        ({"k": 1, "v": 1, "cache_seqlens": 3}, "k", "is int"),
        ({"cache_seqlens": 3.5}, "cache_seqlens", "3.5; give int32"),
        ({"cache_seqlens": True}, "cache_seqlens", "True; give int32"),
        ({"cache_seqlens": [3, 4]}, "cache_seqlens", "give int32"),
        ({"cache_seqlens": INDEX([3, 4])}, "cache_seqlens", "int64"),
        ({"cache_seqlens": INDEX([3], dtype=torch.int32)}, "cache_seqlens", r"int32 \[1\]; give int32 \[2\]"),
        ({"cache_batch_idx": INDEX([0.0, 1.7])}, "cache_batch_idx", "float32"),
        ({"cache_batch_idx": INDEX([0, 1, 1])}, "cache_batch_idx", r"int64 \[3\]; give int32 \[2\]"),
        ({"cache_batch_idx": INDEX([0, -1]), "k": NOW, "v": NOW, "cache_seqlens": 3}, "cache_batch_idx", "-1 for"),
        ({"block_table": INDEX([0, 1], dtype=torch.int32), "cache_seqlens": 3}, "block_table", r"int32 \[2, max_pages"),
        ({"block_table": INDEX([[0.0], [1.0]]), "cache_seqlens": 3}, "block_table", "float32"),
        ({"q": torch.ones(3, 1, 4, 32)}, "k_cache", "has 2 rows; give one for each of 3 sequences"),
        ({"q": torch.ones(2, 4, 32)}, "q", r"give \[B, S, H, D\]"),
        ({"q": None}, "q", "is NoneType"),
        ({"window_size": 4}, "window_size", r"is 4; give \(left, right\)"),
        ({"window_size": None}, "window_size", "is None"),
    ],
)  # fmt: skip
def test_wrong_operands_of_a_cache_are_named_and_nothing_is_written(given, parameter, part) -> None:
    caches = torch.full((2, 2, 24, 2, 32), 7.0)
    call = {"q": torch.ones(2, 1, 4, 32), "k_cache": caches[0], "v_cache": caches[1]} | given
    with pytest.raises(InvalidArgument, match=part) as caught:
        flash_attn_with_kvcache(**call)
    assert (caught.value.op, caught.value.parameter) == ("flash_attn_with_kvcache", parameter)
    assert bool((caches == 7).all())


def test_new_tokens_without_a_page_are_written_nowhere(monkeypatch) -> None:
    caches = torch.full((2, 3, 16, 2, 32), 7.0)
    table = torch.tensor([[0, -1], [1, -1]], dtype=torch.int32)
    lens = torch.tensor([16, 3], dtype=torch.int32)
    with pytest.raises(InvalidArgument, match="names page -1"):
        flash_attn_with_kvcache(torch.ones(2, 1, 4, 32), *caches, NOW, NOW, cache_seqlens=lens, block_table=table)
    assert bool((caches[:, [0, 2]] == 7).all())
    # As on a GPU, where nobody looks at lengths: those past the table are not written either.
    flash_attn._append(*caches, NOW, NOW, table, torch.tensor([-1, 32], dtype=torch.int32))
    assert int((caches != 7).sum()) == 2 * NOW[0].numel()


@pytest.mark.parametrize("given", [None, [0, 2]])
def test_offsets_of_pages_are_named_if_they_are_none(given) -> None:
    offsets, pages = torch.tensor([0, 2], dtype=torch.int32), torch.ones(1, 16, 2, 32)
    with pytest.raises(InvalidArgument, match="flash_attn_varlen_func: cu_seqlens_k is"):
        flash_attn_varlen_func(
            torch.ones(2, 4, 32), pages, pages, offsets, given, 2, 2, block_table=torch.zeros(1, 1, dtype=torch.int32)
        )


def test_a_number_stands_for_all_lengths() -> None:
    q, k_cache, v_cache = torch.randn(2, 1, 4, 32), *torch.randn(2, 2, 24, 2, 32)
    whole = flash_attn_with_kvcache(q, k_cache, v_cache)
    assert torch.equal(whole, flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=24))
    part = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=9)
    close(part[1], expected(q[1], k_cache[1, :9], v_cache[1, :9])[0])


def test_what_is_not_supported_is_named() -> None:
    q = torch.randn(1, 2, 4, 32)
    for call, parameter, value in (
        (flash_attn_func, "dropout_p", 0.1),
        (flash_attn_func, "alibi_slopes", torch.ones(4)),
        (flash_attn_with_kvcache, "rotary_cos", torch.ones(4)),
        (flash_attn_with_kvcache, "cache_leftpad", torch.ones(1)),
        (flash_attn_with_kvcache, "k", q),
        (flash_attn_with_kvcache, "block_table", torch.zeros(1, 1, dtype=torch.int32)),
    ):
        with pytest.raises(InvalidArgument) as caught:
            call(q, q, q, **{parameter: value})
        expected_name = {"k": "v", "block_table": "cache_seqlens"}.get(parameter, parameter)
        assert caught.value.parameter == expected_name
        assert call.__name__ in str(caught.value)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(InvalidArgument, match="cache_batch_idx"):
        flash_attn_with_kvcache(q, q, q, block_table=table, cache_batch_idx=torch.zeros(1), cache_seqlens=1)
    with pytest.raises(InvalidArgument, match="requires grad"):
        flash_attn_func(q.requires_grad_(), q, q)


@dataclass
class Step:
    """What the layers of a step share in an engine of nano-vllm's form."""

    is_prefill: bool
    slot_mapping: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    context_lens: Tensor | None = None
    block_tables: Tensor | None = None


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.view(-1, *cache.shape[2:])[slots[slots >= 0]] = new[slots >= 0]


class Layer:
    """Attention of nano-vllm's form: pages of 256 tokens, prompts with and without a cached prefix, decode."""

    def __init__(self, blocks: int, kv_heads: int, width: int) -> None:
        self.k_cache, self.v_cache = torch.full((2, blocks, 256, kv_heads, width), float("nan"))
        self.scale = 0.2

    def __call__(self, step: Step, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        store(k, v, self.k_cache, self.v_cache, step.slot_mapping)
        if not step.is_prefill:
            return flash_attn_with_kvcache(
                q[:, None],
                self.k_cache,
                self.v_cache,
                cache_seqlens=step.context_lens,
                block_table=step.block_tables,
                softmax_scale=self.scale,
                causal=True,
            )[:, 0]
        if step.block_tables is not None:
            k, v = self.k_cache, self.v_cache
        return flash_attn_varlen_func(
            q,
            k,
            v,
            max_seqlen_q=step.max_seqlen_q,
            cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_k=step.max_seqlen_k,
            cu_seqlens_k=step.cu_seqlens_k,
            softmax_scale=self.scale,
            causal=True,
            block_table=step.block_tables,
        )


def offsets(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32)


class LayerBySteps(Layer):
    """The same layer with the `forward` that benchmarks/nano_vllm.py gives it; each step runs it twice."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.module = SimpleNamespace(
            Attention=type("Attention", (), {}), store_kvcache=store, get_context=lambda: self.context
        )
        self.steps = nano_vllm.attend_by_steps(self.module)
        self.count = 0

    def __call__(self, step: Step, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.context, self.count = step, self.count + 1
        first = self.module.Attention.forward(self, q, k, v)
        assert torch.equal(self.module.Attention.forward(self, q, k, v), first)
        assert self.steps.begun == self.count
        return first


@pytest.mark.parametrize("form", [Layer, LayerBySteps])
def test_an_engine_of_nano_vllm_s_form_changes_its_import_only(form) -> None:
    """Prompts, prompts with a cached prefix, then decode with a padded batch: each step is dense causal attention."""
    torch.manual_seed(0)
    heads, kv_heads, width = 4, 2, 32
    lens = [300, 20, 513]
    whole = [[torch.randn(length + 8, n, width) for n in (heads, kv_heads, kv_heads)] for length in lens]
    tables = torch.tensor([[3, 1, -1], [5, -1, -1], [0, 2, 4]], dtype=torch.int32)
    layer = form(7, kv_heads, width)

    def slots(row: int, first: int, last: int) -> Tensor:
        at = torch.arange(first, last)
        return tables[row, at // 256].long() * 256 + at % 256

    def run(firsts: list[int], lasts: list[int], cached: bool) -> None:
        spans = list(zip(firsts, lasts, strict=True))
        step = Step(
            True,
            torch.cat([slots(row, *span) for row, span in enumerate(spans)]),
            offsets([last - first for first, last in spans]),
            offsets(lasts),
            max(last - first for first, last in spans),
            max(lasts),
            block_tables=tables if cached else None,
        )
        q, k, v = (torch.cat([whole[row][n][first:last] for row, (first, last) in enumerate(spans)]) for n in range(3))
        check(layer(step, q, k, v), spans)

    def check(out: Tensor, spans: list[tuple[int, int]]) -> None:
        at = 0
        for row, (first, last) in enumerate(spans):
            q, k, v = whole[row]
            want, _ = expected(q[first:last], k[:last], v[:last], causal=True, softmax_scale=0.2)
            close(out[at : at + last - first], want)
            at += last - first

    run([0, 0, 0], [256, 15, 256], cached=False)
    run([256, 15, 256], lens, cached=True)
    for token in range(3):
        lasts = [length + token + 1 for length in lens]
        spans = [(last - 1, last) for last in lasts]
        step = Step(
            False,
            torch.cat([*(slots(row, *span) for row, span in enumerate(spans)), torch.tensor([-1])]),
            context_lens=torch.tensor([*lasts, 0], dtype=torch.int32),
            block_tables=torch.cat([tables, torch.zeros(1, 3, dtype=torch.int32)]),  # a captured batch has padding
        )
        q, k, v = (
            torch.cat(
                [*(whole[row][n][first:last] for row, (first, last) in enumerate(spans)), torch.ones(1, h, width)]
            )
            for n, h in enumerate((heads, kv_heads, kv_heads))
        )
        check(layer(step, q, k, v)[:-1], spans)


class RowParallel:
    """A layer of nano-vllm's form: each rank has some columns of the weight; `layers.dist` adds up the products."""

    def __init__(self, layers: Any, weight: Tensor, rank: int, size: int) -> None:
        self.layers, self.rank, self.size = layers, rank, size
        self.weight = weight.tensor_split(size, dim=1)[rank]

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x.tensor_split(self.size, dim=1)[self.rank], self.weight)
        if self.layers.dist.get_world_size() > 1:
            self.layers.dist.all_reduce(y)
        return y


def sums_of_layers(rank: int, size: int) -> dict[str, Any]:
    """What a rank's layer gives, as far from the whole product as says `wrong`, and which kernel added up."""
    layers = SimpleNamespace(dist=torch.distributed)
    nano_vllm.sum_by_kernelhub(layers)
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64), torch.randn(48, 64)
    wrong = (RowParallel(layers, weight, rank, size)(x) - x @ weight.T).abs().max().item()
    return {"wrong": wrong, "ran": [row.kernel for row in kernelhub.report().rows if row.op == "all_reduce"]}


@pytest.mark.xdist_group("ranks")
def test_sums_over_the_ranks_of_nano_vllm_s_layers_are_kernelhub_s(tmp_path) -> None:
    ranks = run_world(2, sums_of_layers, tmp_path)
    assert all(rank is not None and rank["wrong"] < 1e-4 for rank in ranks), ranks
    assert [rank["ran"] for rank in ranks] == [["torch.distributed"]] * 2
