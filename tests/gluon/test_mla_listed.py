"""The Gluon decode of latent attention over lists in the emulator: contract, interleavings, and planted faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernelhub.backends.gluon.mla import listed, listed_adapter, listed_float8
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.ops.mla.attention.reference import mla_attention_reference
from tests.contract.mla_attention import MlaContract
from tests.gluon.emulate import EmulationError
from tests.gluon.emulated import Emulated, emulated
from tests.gluon.planted import planted
from tests.gluon.test_mla import TWO_SMS


class TestDecodeOfLists(Emulated, MlaContract):
    kernel = "emulated.decode_listed"
    device = "cpu"
    most_elements = 500_000
    fewest_cases = 10
    widths = (512, 64)
    lists_all = True


class TestDecodeOfListsOfFloat8(Emulated, MlaContract):
    kernel = "emulated.decode_listed_fp8"
    device = "cpu"
    most_elements = 1_000_000
    fewest_cases = 5
    widths = (512, 64)
    lists_all = True
    kv_scale = "tensor"


def run(
    seed: int,
    tokens: int | None = None,
    seq_lens: Any = (500, 0, 65),
    topk: int = 300,
    page_size: int = 64,
    heads: int = 6,
    spoil: Any = None,
    unseen: Any = None,
    kv_scale: Any = None,
    **features: Any,
) -> bool:
    """Whether a step of few heads, which two programs share, gives the reference."""
    sizes = {"num_heads": heads, "page_size": page_size, "topk": topk}
    if kv_scale is not None:
        sizes["kv_dtype"] = torch.float8_e4m3fn
    arguments = mla_attention_inputs(seq_lens=seq_lens, q_lens=tokens, **sizes)
    if kv_scale is not None:
        arguments["kv_scale"] = torch.tensor([kv_scale]) if features.get("on_device") else kv_scale
    if spoil is not None:
        spoil(arguments)
    q, lists = arguments["q"], arguments["topk_indices"]
    sinks = torch.linspace(-1, 4, heads) if features.get("sinks") else None
    causal = tokens is not None
    problem = MlaProblem(
        device=TWO_SMS,
        num_heads=heads,
        page_size=page_size,
        q_len="one" if tokens is None else "few",
        causal=causal,
        sparse=True,
        lse=True,
        sinks=sinks is not None,
        kv_dtype="bfloat16" if kv_scale is None else "float8_e4m3fn",
        kv_scale=None if kv_scale is None else "tensor" if features.get("on_device") else "value",
    )
    out = features.get("out", torch.full((*q.shape[:-1], 512), torch.nan, dtype=q.dtype))
    lse = torch.full((heads, len(q)) if tokens is None else (len(q), heads, tokens), torch.nan)
    step = PagedStep(arguments["block_table"], arguments["seq_lens"])
    values = MlaValues(arguments["scale"], sinks, arguments.get("kv_scale"))
    want, want_lse = mla_attention_reference(**arguments, sinks=sinks, return_lse=True)
    if unseen is not None:
        unseen(arguments)
    with emulated(seed):
        made = (listed_adapter.Listed if kv_scale is None else listed_adapter.ListedFloat8)(problem)
        made.launch(q, arguments["kv_cache"], lists.flatten(0, -2), step, values, out, lse)
    return bool(compare_out(out, want, 4.5).ok and compare_lse(lse, want_lse) <= lse_tolerance(out.dtype))


formats = pytest.mark.parametrize("kv_scale", [None, 2.0**-6], ids=["bfloat16", "float8"])


@formats
@pytest.mark.parametrize("seed", range(3))
def test_every_interleaving_gives_the_reference(seed: int, kv_scale: float | None) -> None:
    assert run(seed, kv_scale=kv_scale)


@formats
@pytest.mark.parametrize(("topk", "page_size"), [(0, 64), (1, 64), (64, 16), (129, 1), (256, 64)])
def test_lists_and_pages_of_any_size(topk: int, page_size: int, kv_scale: float | None) -> None:
    assert run(0, topk=topk, page_size=page_size, kv_scale=kv_scale)


@formats
def test_two_tokens_and_sinks(kv_scale: float | None) -> None:
    assert run(0, tokens=2, sinks=True, kv_scale=kv_scale, on_device=True)


@formats
def test_more_heads_than_a_tile_has(kv_scale: float | None) -> None:
    assert run(0, heads=70, topk=70, kv_scale=kv_scale)


def test_a_scale_below_zero_and_queries_of_any_size() -> None:
    def spoil(arguments: dict[str, Any]) -> None:
        q = arguments["q"]
        q[0, 1], q[0, 2], q[0, 3] = 0.0, q[0, 2] * 2.0**-100, q[0, 3] * 2.0**-130
        q[2] *= 2.0**60
        arguments["scale"] *= 2.0**-60

    assert run(0, spoil=spoil, kv_scale=-(2.0**-6))


@formats
def test_entries_that_are_no_token_and_nan_in_what_is_not_listed(kv_scale: float | None) -> None:
    def spoil(arguments: dict[str, Any]) -> None:
        lists = arguments["topk_indices"]
        lists[0, ::3] = -1
        lists[0, 1::7] = 1 << 30
        lists[1] = 3  # of a sequence of no tokens
        lists[2, 5] = 65  # behind the last

    def unseen(arguments: dict[str, Any]) -> None:
        table, cache = arguments["block_table"], arguments["kv_cache"]
        listed_rows = {(int(table[s, int(t) // 64]), int(t) % 64) for s, t in _listed(arguments)}
        for page in range(len(cache)):
            for row in range(64):
                if (page, row) not in listed_rows:
                    cache[page, row] = torch.nan

    assert run(0, spoil=spoil, unseen=unseen, kv_scale=kv_scale)


def _listed(arguments: dict[str, Any]) -> list[tuple[int, int]]:
    lengths = arguments["seq_lens"].tolist()
    lists = arguments["topk_indices"].tolist()
    return [(s, t) for s, row in enumerate(lists) for t in row if 0 <= t < lengths[s]]


@formats
@pytest.mark.parametrize("uneven", [False, True], ids=["rows", "pages not of whole rows"])
def test_strided_operands(uneven: bool, kv_scale: float | None) -> None:
    def spoil(arguments: dict[str, Any]) -> None:
        q, cache = arguments["q"], arguments["kv_cache"]
        arguments["q"] = torch.full((*q.shape[:-1], 640), torch.nan, dtype=q.dtype)[..., 64:].copy_(q)
        # Pages of layers side by side, and where they are uneven 32 elements more between two of them.
        layers = torch.full((len(cache), 3 * 64 * 576 + 32 * uneven), torch.nan).to(cache.dtype)
        layer = layers[:, 64 * 576 : 2 * 64 * 576].unflatten(1, (64, 576))
        layer.copy_(cache)
        arguments["kv_cache"] = layer
        wide = arguments["topk_indices"].new_full((3, 333), 1)
        wide[:, :300] = arguments["topk_indices"]
        arguments["topk_indices"] = wide[:, :300]

    out = torch.full((3, 6, 1024), torch.nan).bfloat16()[..., ::2]
    assert run(0, spoil=spoil, out=out, kv_scale=kv_scale)


FAULTS = {
    "left halves are filled before they are released": ("mbarrier.wait(empty_l.index(0), phase)", "pass"),
    "right halves are filled before they are released": ("mbarrier.wait(empty_r.index(0), phase)", "pass"),
    "what is hidden is written before it is read": (
        "                mbarrier.wait(empty_r.index(1), phase)\n"
        '                hidden.index(1).store(gl.where(seen_odd, 0.0, float("-inf")))\n',
        '                hidden.index(1).store(gl.where(seen_odd, 0.0, float("-inf")))\n'
        "                mbarrier.wait(empty_r.index(1), phase)\n",
    ),
    "a half that is released late comes before one that is needed": (
        "                mbarrier.wait(empty_r.index(0), phase)\n"
        "                copy_half(cache, even, seen_even, k_right.index(0), k_rope.index(0), full_r0, True)\n"
        "                mbarrier.wait(empty_l.index(1), phase)\n"
        "                copy_half(cache, odd, seen_odd, k_left.index(1), k_rope.index(1), full_l1, False)\n",
        "                mbarrier.wait(empty_l.index(1), phase)\n"
        "                copy_half(cache, odd, seen_odd, k_left.index(1), k_rope.index(1), full_l1, False)\n"
        "                mbarrier.wait(empty_r.index(0), phase)\n"
        "                copy_half(cache, even, seen_even, k_right.index(0), k_rope.index(0), full_r0, True)\n",
    ),
    "the queries are filled before they are released": ("mbarrier.wait(empty_q, (walked & 1) ^ 1)", "pass"),
    "entries that are no token are seen": ("seen = (token >= 0) & (token < limit)", "seen = token < limit"),
    "tokens behind the last are seen": ("seen = (token >= 0) & (token < limit)", "seen = token >= 0"),
}


FAULTS_OF_FLOAT8 = {
    **{name: FAULTS[name] for name in list(FAULTS)[:2]},
    "what is hidden is written before it is read": tuple(
        text.replace("seen_odd", "odd >= 0") for text in FAULTS["what is hidden is written before it is read"]
    ),
    "the queries are filled before they are released": FAULTS["the queries are filled before they are released"],
    "entries that are no token are seen": (
        "gl.where((token >= 0) & (token < limit), token, -1)",
        "gl.where(token < limit, gl.maximum(token, 0), -1)",
    ),
    "tokens behind the last are seen": ("(token >= 0) & (token < limit)", "token >= 0"),
    "rows are written with no fence": (
        "    fence_async_shared()\n    mbarrier.arrive(full",
        "    mbarrier.arrive(full",
    ),
    "queries are narrowed before they have come": ("            mbarrier.wait(full_q, walked & 1)\n", ""),
    "queries are narrowed with no fence": (
        "            fence_async_shared()\n            mbarrier.arrive(ready_q",
        "            mbarrier.arrive(ready_q",
    ),
    "scores lack the power of their row": (
        "factors.store(bits.to(gl.float32, bitcast=True))",
        "factors.store(inverse)",
    ),
    "the half that comes next is of other rows": ("cache, unit, odd, 256)", "cache, unit, even, 256)"),
    "the rotary part is of other rows": ("cache, unit, even, odd, 0)", "cache, unit, odd, odd, 0)"),
    "odd entries of the next pair are its even ones": ("pair * 128 + 192", "pair * 128 + 128"),
    "pieces of a right half are mixed up": ("return b, c, d, a", "return a, b, c, d"),
}


@pytest.mark.parametrize(
    ("module", "fault"),
    [*((listed, fault) for fault in FAULTS), *((listed_float8, fault) for fault in FAULTS_OF_FLOAT8)],
    ids=lambda value: value if isinstance(value, str) else value.__name__.rpartition(".")[2],
)
def test_planted_faults_are_found(module: Any, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = f"{module.__name__.rpartition('.')[2]}_kernel"
    faults = FAULTS if module is listed else FAULTS_OF_FLOAT8
    monkeypatch.setattr(listed_adapter, kernel, getattr(planted(module, *faults[fault], tmp_path), kernel))

    def spoil(arguments: dict[str, Any]) -> None:
        arguments["topk_indices"][1, :3] = torch.tensor([-1, 200, 199])

    def wrong(seed: int) -> bool:
        try:
            kv_scale = None if module is listed else 2.0**-6
            return not run(seed, seq_lens=(500, 200), topk=400, spoil=spoil, kv_scale=kv_scale)
        except EmulationError:
            return True

    assert any(wrong(seed) for seed in range(25))
