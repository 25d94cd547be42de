"""The Gluon decode of latent attention over lists in the emulator: contract, interleavings, and planted faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernelhub.backends.gluon.mla import listed, listed_adapter
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


def run(
    seed: int,
    tokens: int | None = None,
    seq_lens: Any = (500, 0, 65),
    topk: int = 300,
    page_size: int = 64,
    heads: int = 6,
    spoil: Any = None,
    unseen: Any = None,
    **features: Any,
) -> bool:
    """Whether a step of few heads, which two programs share, gives the reference."""
    sizes = {"num_heads": heads, "page_size": page_size, "topk": topk}
    arguments = mla_attention_inputs(seq_lens=seq_lens, q_lens=tokens, **sizes)
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
    )
    out = features.get("out", torch.full((*q.shape[:-1], 512), torch.nan, dtype=q.dtype))
    lse = torch.full((heads, len(q)) if tokens is None else (len(q), heads, tokens), torch.nan)
    step = PagedStep(arguments["block_table"], arguments["seq_lens"])
    values = MlaValues(arguments["scale"], sinks)
    want, want_lse = mla_attention_reference(**arguments, sinks=sinks, return_lse=True)
    if unseen is not None:
        unseen(arguments)
    with emulated(seed):
        made = listed_adapter.Listed(problem)
        made.launch(q, arguments["kv_cache"], lists.flatten(0, -2), step, values, out, lse)
    return bool(compare_out(out, want, 4.5).ok and compare_lse(lse, want_lse) <= lse_tolerance(out.dtype))


@pytest.mark.parametrize("seed", range(3))
def test_every_interleaving_gives_the_reference(seed: int) -> None:
    assert run(seed)


@pytest.mark.parametrize(("topk", "page_size"), [(0, 64), (1, 64), (64, 16), (129, 1), (256, 64)])
def test_lists_and_pages_of_any_size(topk: int, page_size: int) -> None:
    assert run(0, topk=topk, page_size=page_size)


def test_two_tokens_and_sinks() -> None:
    assert run(0, tokens=2, sinks=True)


def test_more_heads_than_a_tile_has() -> None:
    assert run(0, heads=70, topk=70)


def test_entries_that_are_no_token_and_nan_in_what_is_not_listed() -> None:
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

    assert run(0, spoil=spoil, unseen=unseen)


def _listed(arguments: dict[str, Any]) -> list[tuple[int, int]]:
    lengths = arguments["seq_lens"].tolist()
    lists = arguments["topk_indices"].tolist()
    return [(s, t) for s, row in enumerate(lists) for t in row if 0 <= t < lengths[s]]


def test_strided_operands() -> None:
    def spoil(arguments: dict[str, Any]) -> None:
        q, cache = arguments["q"], arguments["kv_cache"]
        arguments["q"] = torch.full((*q.shape[:-1], 640), torch.nan, dtype=q.dtype)[..., 64:].copy_(q)
        layers = torch.full((len(cache), 3, 64, 576), torch.nan, dtype=cache.dtype)  # pages of layers side by side
        layers[:, 1] = cache
        arguments["kv_cache"] = layers[:, 1]
        wide = arguments["topk_indices"].new_full((3, 333), 1)
        wide[:, :300] = arguments["topk_indices"]
        arguments["topk_indices"] = wide[:, :300]

    assert run(0, spoil=spoil, out=torch.full((3, 6, 1024), torch.nan).bfloat16()[..., ::2])


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


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planted(listed, *FAULTS[fault], tmp_path)
    monkeypatch.setattr(listed_adapter, "listed_kernel", made.listed_kernel)

    def spoil(arguments: dict[str, Any]) -> None:
        arguments["topk_indices"][1, :3] = torch.tensor([-1, 200, 199])

    def wrong(seed: int) -> bool:
        try:
            return not run(seed, seq_lens=(500, 200), topk=400, spoil=spoil)
        except EmulationError:
            return True

    assert any(wrong(seed) for seed in range(25))
